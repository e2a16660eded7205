"""The tasks: attempts of an agent as trajectories with exact token ids and log-probabilities.

This module is independent of algorithms. Attempts are recorded as the proxy does it: each turn's prompt continues the
tokens of the turn before, and the output includes the token that ended it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from agents_examples.calculator.sampling import Attempt, Completion, read_answer, sample
from agents_examples.calculator.tasks import CALCULATOR, Problem, random_problem, score
from agents_examples.tiny.vocabulary import render
from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.identifiers import GroupId, SessionId, TurnId
from proxy.contract.trajectory import Trajectory, TrajectoryGroup, TrajectoryTurn
from proxy.contract.turn import FinishReason, LogprobConvention, VersionSpan

GROUPS, MEMBERS = 16, 8
"""Sizes of a batch. Ungrouped traffic has as many sessions as these groups together."""

CHECKPOINT = Path(__file__).parents[2] / "agents_examples" / "calculator" / "checkpoint"

LONGEST = 48
_MAX_TURNS = 3
FULL_MARKS = 100.0


class Attempted(NamedTuple):
    """A batch of attempts, and a score from 0 to 1 for each. The trainer's rewards may be other numbers, or
    missing."""

    groups: list[TrajectoryGroup]
    scores: list[float]


class Task(Protocol):
    """A task. `learning_rate` and the largest number of `steps` depend on the task, not on the algorithm. A run takes
    about `seconds` of a core."""

    name: str
    seconds: float
    learning_rate: float
    steps: int

    def prepare(self, directory: Path, seed: int) -> Path:
        """Return the directory of the initial model, which may be made in `directory`."""
        ...

    def attempt(self, model: Any, rng: random.Random, generator: torch.Generator, version: int) -> Attempted:
        """Return a batch of attempts by this policy and version."""
        ...


@dataclass
class _Recorded:
    """An unfinished attempt: the token ids of its path, and its turns."""

    version: int
    path: list[int] = field(default_factory=list)
    turns: list[TrajectoryTurn] = field(default_factory=list)

    def record(self, prompt: Sequence[int], said: Completion, *, ended: bool = True) -> None:
        """Add a turn. `prompt` has the tokens after the path so far. `ended` is False for an answer that was cut."""
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
                finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
            )
        )
        self.path += [*prompt, *said.ids]

    def prompt_of(self, number: int) -> list[int]:
        """Return the whole prompt of a turn."""
        return [token for turn in self.turns[:number] for token in (*turn.prompt_ids, *turn.output_ids)] + list(
            self.turns[number].prompt_ids
        )

    def finished(self, group: GroupId | None, reward: float | None) -> Trajectory:
        session = SessionId(f"ses_{next(_numbers)}")
        return Trajectory(session_id=session, group_id=group, task=None, turns=tuple(self.turns), reward=reward)


_numbers = itertools.count()


class Calculator:
    """The demo's agent: it may call a calculator, and is rewarded for `The answer is N.` with the right number."""

    name = "calculator"
    seconds = 14.0
    learning_rate = 2.5e-4
    steps = 60

    def prepare(self, directory: Path, seed: int) -> Path:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT)
        return CHECKPOINT

    def attempt(self, model: Any, rng: random.Random, generator: torch.Generator, version: int) -> Attempted:
        problems = [problem for problem in [random_problem(rng) for _ in range(GROUPS)] for _ in range(MEMBERS)]
        attempts = self.conversations(problems, model, generator, version)
        return _grouped(
            [attempt.recorded for attempt in attempts],
            [score(attempt.problem, attempt.answer or "") for attempt in attempts],
        )

    def conversations(
        self, problems: Sequence[Problem], model: Any, generator: torch.Generator, version: int
    ) -> list[Conversation]:
        """Return an attempt at each problem, which ends with its answer or with the last allowed turn."""
        tokenizer = self.tokenizer
        stop = tokenizer.eos_token_id

        def draw(prompts: list[list[int]]) -> list[Completion]:
            return sample(
                model,
                prompts,
                temperature=1.0,
                longest=LONGEST,
                stop=stop,
                padding=tokenizer.pad_token_id,
                generator=generator,
            )

        attempts = [Conversation(problem, _Recorded(version)) for problem in problems]
        for _ in range(_MAX_TURNS):
            going = [attempt for attempt in attempts if attempt.answer is None]
            prompts = [tokenizer.encode(attempt.unread(tokenizer)) for attempt in going]
            paths = [attempt.recorded.path + prompt for attempt, prompt in zip(going, prompts, strict=True)]
            for attempt, prompt, said in zip(going, prompts, draw(paths) if going else [], strict=True):
                attempt.recorded.record(prompt, said, ended=stop in said.ids)
                attempt.hear(str(tokenizer.decode(said.without(stop))), tokenizer)
        return attempts


class Conversation(Attempt):
    """A recorded attempt. The first `read` characters of the rendered conversation are on the path already."""

    def __init__(self, problem: Problem, recorded: _Recorded) -> None:
        super().__init__(problem)
        self.recorded = recorded
        self.read = 0

    def unread(self, tokenizer: Any) -> str:
        return render(tokenizer, self.messages, tools=[CALCULATOR], generation_prompt=True)[self.read :]

    def turn_marks(self, full: float) -> list[float]:
        """Return a mark from 0 to `full` for each turn."""
        said = [message for message in self.messages if message["role"] == "assistant"]
        return [full * self.worth(message, number) for number, message in enumerate(said)]

    def worth(self, message: dict[str, Any], number: int) -> float:
        """Return the worth of an answer as turn `number`, from 0 to 1."""
        if "tool_calls" not in message:
            return score(self.problem, message["content"])
        function = message["tool_calls"][0]["function"]
        if number > 0 or function["name"] != "calculator":
            return 0.0
        asked = {"a": self.problem.a, "b": self.problem.b, "op": self.problem.op}
        return 1.0 if json.loads(function["arguments"]) == asked else 0.5

    def hear(self, text: str, tokenizer: Any) -> None:
        """Add the model's answer, and the tool's answer to its call."""
        said = len(self.messages) + 1
        self.receive(read_answer(text))
        # The model ends its own turn; the line break after it belongs to the template.
        self.read = len(render(tokenizer, self.messages[:said], tools=[CALCULATOR]).removesuffix("\n"))


class Live(Calculator):
    """The calculator's agent as live traffic: every session has a problem of its own, and none belongs to a group.

    Rewards are marks from 0 to 100 of different kinds: a third of the sessions has a reward for the session, a third
    one for every turn, and a third one for the session and one for the first turn. A turn earns its mark by the
    correct call of the calculator at the beginning, half of it by a call with other arguments, or by the correct
    answer.
    """

    name = "live"
    seconds = 22.0

    def attempt(self, model: Any, rng: random.Random, generator: torch.Generator, version: int) -> Attempted:
        problems = [random_problem(rng) for _ in range(GROUPS * MEMBERS)]
        attempts = self.conversations(problems, model, generator, version)
        scores = [score(attempt.problem, attempt.answer or "") for attempt in attempts]
        groups = [
            TrajectoryGroup(id=None, trajectories=(self._marked(attempt, right, rng.randrange(3)),))
            for attempt, right in zip(attempts, scores, strict=True)
        ]
        return Attempted(groups, scores)

    def _marked(self, attempt: Conversation, right: float, kind: int) -> Trajectory:
        by_session, judged = kind != 1, (0, len(attempt.recorded.turns), 1)[kind]
        marks = attempt.turn_marks(FULL_MARKS)
        attempt.recorded.turns = [
            msgspec.structs.replace(turn, reward=mark) if number < judged else turn
            for number, (turn, mark) in enumerate(zip(attempt.recorded.turns, marks, strict=True))
        ]
        return attempt.recorded.finished(None, FULL_MARKS * right if by_session else None)


class Lock:
    """Four locks with a secret sequence of three symbols each, one per turn. The agent gets no feedback before the
    last turn; the reward is the share of correct symbols, a quarter at first.

    A reward for whole sequences alone, which one attempt in 64 earns, would measure exploration: about half of the
    algorithms never opened some lock with some seed. At a learning rate of 1e-3 some algorithms also forget what they
    learnt.
    """

    name = "lock"
    seconds = 12.0
    learning_rate = 3e-4
    steps = 400

    _SYMBOLS, _TURNS = 4, 3

    def prepare(self, directory: Path, seed: int) -> Path:
        """Make an untrained model of 26,000 parameters."""
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

    def attempt(self, model: Any, rng: random.Random, generator: torch.Generator, version: int) -> Attempted:
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


def _grouped(attempts: Sequence[_Recorded], rewards: Sequence[float]) -> Attempted:
    groups = []
    for start in range(0, len(attempts), MEMBERS):
        group = GroupId(f"grp_{next(_numbers)}")
        members = zip(attempts[start : start + MEMBERS], rewards[start : start + MEMBERS], strict=True)
        groups.append(
            TrajectoryGroup(id=group, trajectories=tuple(one.finished(group, reward) for one, reward in members))
        )
    return Attempted(groups, list(rewards))


TASKS: dict[str, type[Task]] = {"calculator": Calculator, "lock": Lock, "live": Live}
