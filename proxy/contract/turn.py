"""One model call: exact prompt ids, output ids, log-probabilities and the policy version of every token."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from proxy.contract.identifiers import SessionId, TurnId


class FinishReason(StrEnum):
    """The reason why the engine stopped, in the terms of OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


class Cut(StrEnum):
    """The reason why an answer is incomplete.

    `length`: it reached its bound on tokens or the end of the context. `interrupted`: the client left, or the engine
    or the proxy ended the generation.
    """

    LENGTH = "length"
    INTERRUPTED = "interrupted"


class TurnState(StrEnum):
    """The result of a call.

    `truncated`: the client left, or the engine or the proxy ended the generation, before the client had the whole
    answer; the tokens generated so far are recorded. `failed`: there is no answer, and nothing is trained. `shadow`:
    a complete answer beside the one that the client got, which no client has seen and no conversation continues.
    """

    COMPLETE = "complete"
    TRUNCATED = "truncated"
    FAILED = "failed"
    SHADOW = "shadow"


def cut_of(finish_reason: FinishReason | None, state: TurnState) -> Cut | None:
    """Return the reason why an answer is incomplete; None for a complete answer, and if the finish reason is unknown.

    An answer that ended by itself is complete even if its client had left by then: such a turn is `truncated` with
    the finish reason `stop` or `tool_calls`.
    """
    if finish_reason is not FinishReason.LENGTH:
        return None
    return Cut.INTERRUPTED if state is TurnState.TRUNCATED else Cut.LENGTH


class Continuation(StrEnum):
    """The relation of a turn's prompt to its parent's tokens.

    `exact`: the parent's whole path is reused and only the new suffix was tokenised. `retemplated`: the chat template
    rendered earlier messages differently. `edited`: the client changed earlier messages. `new`: there is no parent.
    """

    EXACT = "exact"
    RETEMPLATED = "retemplated"
    EDITED = "edited"
    NEW = "new"


class LogprobConvention(StrEnum):
    """The distribution that the recorded log-probabilities belong to.

    - `sampled`: the policy's own, scaled by the temperature, from which the tokens were drawn.
    - `adjusted`: the one from which the tokens were drawn; penalties or a logit bias changed the policy's.
    - `constrained`: the policy's, renormalised over the tokens that a constraint allowed. The policy's own
      log-probability is lower by the logarithm of their total probability, which the engine does not report.
    - `untruncated`: the one before top-p, top-k or min-p. The tokens were drawn from the remaining part, whose
      probability the engine does not report.
    """

    SAMPLED = "sampled"
    ADJUSTED = "adjusted"
    CONSTRAINED = "constrained"
    UNTRUNCATED = "untruncated"


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Output tokens `[start, end)` were produced by policy version `version`."""

    version: int
    start: int
    end: int


class ConstraintKind(StrEnum):
    """The language of a constraint; the names are SGLang's."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A form that an answer must match: the engine never draws a token that would violate it. `text` is the schema,
    the pattern, the grammar, or the structural tag as JSON."""

    kind: ConstraintKind
    text: str


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling of a turn's tokens. `top_k` -1 means no cut; `temperature` 0 means greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[str, float] | None = None
    constraint: Constraint | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def logprob_convention(self) -> LogprobConvention:
        """The convention of the log-probabilities; if several apply, the one that a trainer can correct for least."""
        if self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0:
            return LogprobConvention.UNTRUNCATED
        if self.constraint is not None:
            return LogprobConvention.CONSTRAINED
        adjusted = self.presence_penalty or self.frequency_penalty or self.logit_bias
        return LogprobConvention.ADJUSTED if adjusted else LogprobConvention.SAMPLED


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded call.

    The full prompt is the first `prefix_tokens` ids of the parent's path (its prompt and output) followed by
    `prompt_ids`; nothing is stored twice along a path. `output_ids` and `output_logprobs` have equal length, and
    `spans` cover exactly that length in order. `masked` are redacted spans, [start, end) over `prompt_ids` followed
    by `output_ids`, whose content was replaced by placeholders.
    """

    id: TurnId
    session_id: SessionId
    parent_id: TurnId | None
    prefix_tokens: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    sampling: SamplingParameters
    finish_reason: FinishReason
    continuation: Continuation
    state: TurnState
    started_at: float
    first_token_at: float | None
    finished_at: float
    masked: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for start, stop in self.masked:
            if not end <= start < stop <= len(self.prompt_ids) + len(self.output_ids):
                raise ValueError(f"turn {self.id}: masked spans {self.masked} do not follow each other within it")
            end = stop
        if len(self.output_ids) != len(self.output_logprobs):
            raise ValueError(
                f"turn {self.id}: {len(self.output_ids)} output ids but {len(self.output_logprobs)} log-probabilities"
            )
        position = 0
        for span in self.spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"turn {self.id}: version spans {self.spans} do not follow each other")
            position = span.end
        if position != len(self.output_ids):
            raise ValueError(f"turn {self.id}: version spans cover {position} of {len(self.output_ids)} output ids")
        if (self.parent_id is None) != (self.continuation is Continuation.NEW):
            raise ValueError(f"turn {self.id}: a turn is `new` exactly when it has no parent")
        if self.parent_id is None and self.prefix_tokens:
            raise ValueError(f"turn {self.id}: {self.prefix_tokens} shared tokens without a parent")


class TurnPlace(NamedTuple):
    """The place of a turn in its session's token tree. `prompt_tokens` counts the full prompt."""

    id: str
    parent_id: str | None
    prefix_tokens: int
    prompt_tokens: int
    state: TurnState


def abandoned_turns(turns: Iterable[TurnPlace]) -> frozenset[str]:
    """Return the ids of truncated turns whose answer is in no other turn's prompt.

    A client that times out has received nothing of the answer, or has discarded it: nothing in the session followed
    from it, so no reward of the session is about it. A client that uses the part it received sends it back with its
    next call, and so continues the turn.
    """
    turns = list(turns)
    truncated = {turn.id: turn.prompt_tokens for turn in turns if turn.state is TurnState.TRUNCATED}
    continued = {
        turn.parent_id
        for turn in turns
        if turn.parent_id in truncated and turn.prefix_tokens > truncated[turn.parent_id]
    }
    return frozenset(truncated.keys() - continued)
