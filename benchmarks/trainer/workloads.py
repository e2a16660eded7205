"""Batches in the form in which the trainer claims them: rewarded sessions of random tokens, in realistic shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.identifiers import GroupId, SessionId, TurnId
from proxy.contract.trajectory import Trajectory, TrajectoryTurn
from proxy.contract.turn import LogprobConvention, VersionSpan
from trainer.batching.grouping import Batch

VOCABULARY = 4096
GROUP = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A batch with its advantages: `advantages[i][t]` belongs to turn t of trajectory i. They alternate between 1 and
    −1, half of a group each."""

    batch: Batch
    advantages: tuple[tuple[float, ...], ...]

    def recorded(self, logprobs: dict[tuple[int, int], list[float]]) -> Workload:
        """Return the workload with other recorded log-probabilities, by trajectory and turn."""
        trajectories = tuple(
            msgspec.structs.replace(
                trajectory,
                turns=tuple(
                    msgspec.structs.replace(turn, packed_logprobs=pack_logprobs(logprobs[index, number]))
                    for number, turn in enumerate(trajectory.turns)
                ),
            )
            for index, trajectory in enumerate(self.batch.trajectories)
        )
        batch = Batch(trajectories=trajectories, groups=self.batch.groups, base_version=self.batch.base_version)
        return Workload(batch=batch, advantages=self.advantages)


def single_turn(numbers: random.Random, groups: int) -> Workload:
    """Sessions with one answer. Prompts have 32 to 128 tokens; answers have a median of 96, from 16 to 384
    (log-normal, σ 0.7)."""

    def attempts() -> Iterable[list[TrajectoryTurn]]:
        prompt = _ids(numbers, numbers.randint(32, 128))
        for _ in range(GROUP):
            length = min(384, max(16, round(96 * numbers.lognormvariate(0, 0.7))))
            yield [_turn(numbers, prompt, length)]

    return _workload(attempts, groups)


def branching(numbers: random.Random, groups: int) -> Workload:
    """Agents that use tools: a task of 128 tokens, then six answers of 24 to 64 tokens, each followed by a tool
    result of 16 to 48. Every third answer is sampled twice from the same history, and the session continues from the
    second."""

    def attempts() -> Iterable[list[TrajectoryTurn]]:
        task = _ids(numbers, 128)
        for _ in range(GROUP):
            turns: list[TrajectoryTurn] = []
            parent, before = None, 0
            for _call in range(6):
                said = task if parent is None else _ids(numbers, numbers.randint(16, 48))
                for _ in range(2 if numbers.random() < 1 / 3 else 1):
                    length = numbers.randint(24, 64)
                    turns.append(_turn(numbers, said, length, parent, before))
                parent, before = len(turns) - 1, before + len(said) + length
            yield turns

    return _workload(attempts, groups)


def shared_prefix(numbers: random.Random, groups: int, prefix: int = 512, answer: int = 64) -> Workload:
    """A prompt of 512 tokens, with eight answers of 64."""

    def attempts() -> Iterable[list[TrajectoryTurn]]:
        prompt = _ids(numbers, prefix)
        for _ in range(GROUP):
            yield [_turn(numbers, prompt, answer)]

    return _workload(attempts, groups)


def sessions_of(numbers: random.Random, lengths: Sequence[tuple[int, int]]) -> Workload:
    """Sessions with one answer and without a shared prefix; `tokens` are those of the prompt and of the answer."""
    left = iter(lengths)

    def attempts() -> Iterable[list[TrajectoryTurn]]:
        for _ in range(min(GROUP, len(lengths))):
            prompt, answer = next(left)
            yield [_turn(numbers, _ids(numbers, prompt), answer)]

    return _workload(attempts, len(lengths) // min(GROUP, len(lengths)))


WORKLOADS: dict[str, tuple[Callable[[random.Random, int], Workload], int]] = {
    "single_turn": (single_turn, 4),
    "branching": (branching, 2),
    "shared_prefix": (shared_prefix, 1),
}
"""Workloads by name, each with its number of groups."""


def _workload(attempts: Callable[[], Iterable[list[TrajectoryTurn]]], groups: int) -> Workload:
    members = [(group, turns) for group in range(groups) for turns in attempts()]
    trajectories = tuple(
        Trajectory(
            session_id=SessionId(f"ses_{index}"),
            group_id=GroupId(f"grp_{group}"),
            task=None,
            turns=tuple(turns),
            reward=float(index % 2),
        )
        for index, (group, turns) in enumerate(members)
    )
    return Workload(
        batch=Batch(trajectories=trajectories, groups=tuple(group for group, _ in members), base_version=0),
        advantages=tuple((1.0 if index % 2 else -1.0,) * len(turns) for index, (_, turns) in enumerate(members)),
    )


def _turn(
    numbers: random.Random, prompt: Sequence[int], length: int, parent: int | None = None, prefix: int = 0
) -> TrajectoryTurn:
    return TrajectoryTurn(
        id=TurnId(f"turn_{numbers.getrandbits(64):016x}"),
        parent=parent,
        prefix_tokens=prefix,
        packed_prompt_ids=pack_ids(prompt),
        packed_output_ids=pack_ids(_ids(numbers, length)),
        packed_logprobs=pack_logprobs([-8.0] * length),
        spans=(VersionSpan(version=0, start=0, end=length),),
        temperature=1.0,
        convention=LogprobConvention.SAMPLED,
        trainable=True,
    )


def _ids(numbers: random.Random, count: int) -> list[int]:
    return [numbers.randrange(1, VOCABULARY) for _ in range(count)]
