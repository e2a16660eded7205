"""Types for a loss, an advantage or a filter of your own, for a file that your configuration names.

```toml
[trainer.algorithm]
loss = "my_file.py:loss"
```

```python
from torch import Tensor
from trainer.algorithm.custom import LossInputs

def loss(inputs: LossInputs) -> Tensor: ...
```

Axes: N trained tokens of a micro-batch. Each function is tried on made-up data when the trainer starts. It must
return the same for the same arguments, in every process, and must leave its arguments as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """The N trained tokens of one micro-batch, in the order of their answers; an answer is the output of one turn and
    never divided between micro-batches. Reals are float32. Log-probabilities and entropies, in nats, are of the
    distribution at the temperature that the token was sampled at. `logprobs_N` and `entropy_N` carry the gradient.

    - `logprobs_N`: under the policy that is trained.
    - `entropy_N`: of the policy's distribution at the token.
    - `proximal_N`: under the proximal policy (`algorithm.proximal`), so that the ratio is
      exp(logprobs_N − proximal_N).
    - `behaviour_N`: as recorded by the engine that sampled the token.
    - `reference_N`: under the base model; None while `kl_coefficient` is 0.
    - `advantages_N`: one value for all tokens of an answer, or one for each with a critic or `kl_form` k1.
    - `answer_N`: the number of the token's answer in this micro-batch, from 0, int64.
    - `staleness_N`: versions between the policy that sampled the token and the one that the step trains.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    proximal_N: Tensor
    behaviour_N: Tensor
    reference_N: Tensor | None
    advantages_N: Tensor
    answer_N: Tensor
    staleness_N: Tensor


class Loss(Protocol):
    """Return one term per token, shape N, with a gradient: not their mean or sum.

    The trainer adds up share · w · term. The share is 1 / the batch's denominator (`algorithm.denominator`), and w
    the importance weight against the engine (`correction`; 1 with `proximal` = behaviour). So micro-batches and
    processes change nothing, as long as a term depends on the tokens of its own answer alone; the trial at the start
    checks that. The trainer adds divergence, entropy bonus and masks of tokens as configured.
    """

    def __call__(self, inputs: LossInputs, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One call of the agent and the policy's answer.

    `parent` is the index of the turn that this one goes on from, in its session's `turns`; None: it begins a
    conversation. `prompt_ids` are the token ids that come between that turn's end and this answer, `output_ids` the
    answer, `logprobs` the engine's log-probabilities of it, one per token. `trained` is false for turns that teach
    nothing, greedy ones for example. `reward` is the turn's own; None: it has none. `superseded` marks an answer that
    the agent did not go on with. `finish_reason` says how the answer ended: "stop", "length", "tool_calls" or
    "content_filter"; None: unknown.
    """

    parent: int | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    trained: bool
    reward: float | None
    superseded: bool = False
    finish_reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A session of the batch with its turns, parents first. `group` is equal for the sessions of one group, and a
    number of its own for a session without one. `reward` is the session's; None: only turns were rewarded.

    For a filter, rewards are as they were posted. For an advantage they went through `[trainer.algorithm.reward]`,
    and the session's through the penalty on overlong answers.
    """

    id: str
    group: int
    task: str | None
    reward: float | None
    turns: tuple[Turn, ...]


class Advantage(Protocol):
    """Return, for each session of the batch, one finite number per turn, in their order.

    They are final: no baseline, scale or discount comes after. A turn with 0 teaches nothing.
    """

    def __call__(self, sessions: Sequence[Session], /) -> Sequence[Sequence[float]]: ...


class Filter(Protocol):
    """Return, for each session of the batch, whether it is kept: one bool each, in their order.

    The others are consumed, counted as `filtered`, and take no part in any baseline.
    """

    def __call__(self, sessions: Sequence[Session], /) -> Sequence[bool]: ...
