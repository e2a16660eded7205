"""What is learnt: attempts of an agent as trajectories with exact token ids and log-probabilities.

Nothing here knows of algorithms. An attempt is what the proxy would record of it: each turn's prompt goes on from the
tokens of the turn before, and the output includes the token that ended it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from agents_examples.calculator.sampling import Attempt, Completion, read_answer, sample
from agents_examples.calculator.tasks import Problem, random_problem, score
from agents_examples.calculator.vocabulary import render
from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.identifiers import GroupId, SessionId, TurnId
from proxy.contract.trajectory import Trajectory, TrajectoryGroup, TrajectoryTurn
from proxy.contract.turn import LogprobConvention, VersionSpan

GROUPS, MEMBERS = 16, 8
"""Of a batch."""

CHECKPOINT = Path(__file__).parents[2] / "agents_examples" / "calculator" / "checkpoint"

_LONGEST = 48
_MAX_TURNS = 3

Groups = list[TrajectoryGroup]


class Task(Protocol):
    """`learning_rate` and `steps` are what the task takes, whatever the algorithm."""

    name: str
    learning_rate: float
    steps: int

    def prepare(self, directory: Path, seed: int) -> Path:
        """The directory of the model that begins; may be made in `directory`."""
        ...

    def attempt(
        self, model: Any, rng: random.Random, generator: torch.Generator, version: int
    ) -> list[TrajectoryGroup]:
        """A batch of attempts by a policy that is this version."""
        ...


@dataclass
class _Recorded:
    """An attempt under way: the ids of its path, and its turns."""

    version: int
    path: list[int] = field(default_factory=list)
    turns: list[TrajectoryTurn] = field(default_factory=list)

    def record(self, prompt: Sequence[int], said: Completion) -> None:
        """`prompt` is what comes after the path so far."""
        self.turns.append(
            TrajectoryTurn(
                id=TurnId(f"turn_{next(_numbers)}"),
                parent=len(self.turns) - 1 if self.turns else None,
                prefix_tokens=len(self.path),
                packed_prompt_ids=pack_ids(prompt),
                packed_output_ids=pack_ids(said.ids),
                packed_logprobs=pack_logprobs(said.logprobs),
                spans=(VersionSpan(version=self.version, start=0, end=len(said.ids)),),
                temperature=1.0,
                convention=LogprobConvention.SAMPLED,
                trainable=True,
            )
        )
        self.path += [*prompt, *said.ids]

    def finished(self, group: GroupId, reward: float) -> Trajectory:
        session = SessionId(f"ses_{next(_numbers)}")
        return Trajectory(session_id=session, group_id=group, task=None, turns=tuple(self.turns), reward=reward)


_numbers = itertools.count()


class Calculator:
    """The demo's agent: it may call a calculator, and is rewarded for `The answer is N.` with the right number."""

    name = "calculator"
    learning_rate = 2.5e-4
    steps = 60

    def prepare(self, directory: Path, seed: int) -> Path:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
        return CHECKPOINT

    def attempt(
        self, model: Any, rng: random.Random, generator: torch.Generator, version: int
    ) -> list[TrajectoryGroup]:
        tokenizer = self._tokenizer
        stop = tokenizer.eos_token_id

        def draw(prompts: list[list[int]]) -> list[Completion]:
            return sample(
                model,
                prompts,
                temperature=1.0,
                longest=_LONGEST,
                stop=stop,
                padding=tokenizer.pad_token_id,
                generator=generator,
            )

        attempts = [
            _Conversation(problem, _Recorded(version))
            for problem in [random_problem(rng) for _ in range(GROUPS)]
            for _ in range(MEMBERS)
        ]
        for _ in range(_MAX_TURNS):
            going = [attempt for attempt in attempts if attempt.answer is None]
            prompts = [tokenizer.encode(attempt.unread(tokenizer)) for attempt in going]
            paths = [attempt.recorded.path + prompt for attempt, prompt in zip(going, prompts, strict=True)]
            for attempt, prompt, said in zip(going, prompts, draw(paths) if going else [], strict=True):
                attempt.recorded.record(prompt, said)
                attempt.hear(str(tokenizer.decode(said.without(stop))), tokenizer)
        return _grouped(
            [attempt.recorded for attempt in attempts],
            [score(attempt.problem, attempt.answer or "") for attempt in attempts],
        )


class _Conversation(Attempt):
    """One that is recorded. `read` characters of the rendered conversation are on the path already."""

    def __init__(self, problem: Problem, recorded: _Recorded) -> None:
        super().__init__(problem)
        self.recorded = recorded
        self.read = 0

    def unread(self, tokenizer: Any) -> str:
        return render(tokenizer, self.messages, generation_prompt=True)[self.read :]

    def hear(self, text: str, tokenizer: Any) -> None:
        said = len(self.messages) + 1
        self.receive(read_answer(text))
        # The model ends its own turn; the line break after it belongs to the frame.
        self.read = len(render(tokenizer, self.messages[:said]).removesuffix("\n"))


class Lock:
    """Each of four locks has its own sequence of three symbols, one a turn. Nothing is said before the last turn, and
    then only how many were right: the share of them is the reward, a quarter at first.

    A reward for whole sequences alone, one attempt in 64, measures exploration: about half of the algorithms never
    opened some lock, in one seed or another. And at a learning rate of 1e-3 some forget again what they have learnt.
    """

    name = "lock"
    learning_rate = 3e-4
    steps = 400

    _SYMBOLS, _TURNS = 4, 3

    def prepare(self, directory: Path, seed: int) -> Path:
        """A model of 26,000 parameters that has seen nothing."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        draw = random.Random(seed)
        self._secrets = [[draw.randrange(self._SYMBOLS) for _ in range(self._TURNS)] for _ in range(self._SYMBOLS)]
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=self._SYMBOLS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=64,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        Qwen3ForCausalLM(config).save_pretrained(directory)
        return directory

    def attempt(
        self, model: Any, rng: random.Random, generator: torch.Generator, version: int
    ) -> list[TrajectoryGroup]:
        locks = [lock for lock in (rng.randrange(self._SYMBOLS) for _ in range(GROUPS)) for _ in range(MEMBERS)]
        attempts = [_Recorded(version) for _ in locks]
        for turn in range(self._TURNS):
            prompts = [[turn if turn else lock] for lock in locks]
            paths = [attempt.path + prompt for attempt, prompt in zip(attempts, prompts, strict=True)]
            drawn = sample(model, paths, temperature=1.0, longest=1, stop=None, padding=0, generator=generator)
            for attempt, prompt, said in zip(attempts, prompts, drawn, strict=True):
                attempt.record(prompt, said)
        right = [
            sum(turn.output_ids[0] == symbol for turn, symbol in zip(attempt.turns, self._secrets[lock], strict=True))
            for attempt, lock in zip(attempts, locks, strict=True)
        ]
        return _grouped(attempts, [count / self._TURNS for count in right])


def _grouped(attempts: Sequence[_Recorded], rewards: Sequence[float]) -> list[TrajectoryGroup]:
    groups = []
    for start in range(0, len(attempts), MEMBERS):
        group = GroupId(f"grp_{next(_numbers)}")
        members = zip(attempts[start : start + MEMBERS], rewards[start : start + MEMBERS], strict=True)
        groups.append(
            TrajectoryGroup(id=group, trajectories=tuple(one.finished(group, reward) for one, reward in members))
        )
    return groups


TASKS: dict[str, Callable[[], Task]] = {"calculator": Calculator, "lock": Lock}
