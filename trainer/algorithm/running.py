"""Running estimates of rewards over a run, for rewards without a group to be compared with.

A reward has a place: the session's (`SESSION`), or the position on its path of the turn whose return-to-go it is.
Every place has an exponential mean and an exponential mean of squared deviations, for the run and for each task. With
decay δ, a batch of N values of a place has the weight w = (1 − δᴺ) / (1 − δ), and the weight W of earlier values
becomes δᴺ·W:

    W' = δᴺ·W + w        mean' = mean + (w / W')·(mean of the N − mean)        V' alike, of (value − baseline)²

The estimates of a task with few values are shrunk towards those of the run. n is the number of the task's values so
far, n' with this batch:

    baseline = (n·mean_task + k·mean_run) / (n + k)        log V = (n'·log V_task + k·log V_run) / (n' + k)

Sessions are of one task if they name the same, or with `task_by = first_message`, if they name none and the first
message of their user is the same.

Spreads are shrunk in their logarithm because they differ by factors: otherwise a task with rewards from 0 to 1 beside
one with rewards from 0 to 100 would never be measured in its own unit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from proxy.contract.trajectory import Trajectory
from trainer.algorithm.rounding import deviation, mean_of, mean_square
from trainer.config import TaskBy
from trainer.errors import WeightsUnusable

SESSION = -1
"""The place of a session's reward; the place of a turn's return is its position, from 0."""

SHRINKAGE = 8.0
"""k: a task's own mean counts half after this many of its trajectories, the size of a usual group."""

MOST_TASKS = 1024
"""Largest number of tasks in a state, to bound the checkpoint. The least recently seen task is dropped. Tasks with
names and first messages are bounded separately: live traffic has any number of first messages."""

_FIRST_MESSAGE = "first message "
# No name of a task begins so: PostgreSQL and the proxy take no NUL.
_MARK = "\0"

MOST_POSITIONS = 16
"""Largest number of positions with estimates of their own, to bound the checkpoint. Later turns share the last
one."""


class Observation(NamedTuple):
    """A reward or return of one trajectory at a place. `task` is None for a trajectory that names no task."""

    task: str | None
    place: int
    value: float


class Met(NamedTuple):
    """An observation's deviation from the running baseline, and the running scale of its trajectory."""

    deviation: float
    scale: float


class Estimate(msgspec.Struct, frozen=True, array_like=True):
    """Mean of the values seen, and mean of their squared deviations.

    `weight` is the effective number of values, which the decay bounds; `seen` is the number of all values.
    """

    weight: float = 0.0
    mean: float = 0.0
    square: float = 0.0
    seen: int = 0

    def updated(self, values: Sequence[float], baseline: float, decay: float) -> Estimate:
        """Return the estimate after a batch, whose deviations are taken from `baseline`.

        A place has no baseline before its first batch, whose deviations are taken from its own mean instead.
        """
        kept = decay ** len(values)
        added = (1 - kept) / (1 - decay)
        mean = mean_of(values)
        if self.weight == 0:
            return Estimate(added, mean, mean_square(values, mean), len(values))
        weight = kept * self.weight + added
        share = added / weight
        return Estimate(
            weight,
            self.mean + share * (mean - self.mean),
            self.square + share * (mean_square(values, baseline) - self.square),
            self.seen + len(values),
        )

    def square_with(self, values: Sequence[float], baseline: float, decay: float) -> float:
        """Return the mean square after a batch, with all deviations from `baseline`, also for a place's first batch.

        Because the batch itself is included, no deviation is divided by a scale much smaller than itself.
        """
        if self.weight == 0:
            return mean_square(values, baseline)
        return self.updated(values, baseline, decay).square


class Scope(msgspec.Struct, frozen=True):
    """The estimates of a run or of one task, by place. `turns[p]` belongs to position p."""

    session: Estimate = Estimate()
    turns: tuple[Estimate, ...] = ()

    def at(self, place: int) -> Estimate:
        """Return the estimate of a place, which is empty before its first value."""
        if place == SESSION:
            return self.session
        place = min(place, MOST_POSITIONS - 1)
        return self.turns[place] if place < len(self.turns) else Estimate()

    def updated(self, values: Mapping[int, Sequence[float]], baseline: Callable[[int], float], decay: float) -> Scope:
        """Return the estimates after a batch. `values` and `baseline` are by place."""
        after = {place: self.at(place).updated(each, baseline(place), decay) for place, each in values.items()}
        positions = max(len(self.turns), *(place + 1 for place in after), 0)
        return Scope(
            session=after.get(SESSION, self.session),
            turns=tuple(after.get(place, self.at(place)) for place in range(positions)),
        )


class RunningMeans(msgspec.Struct, frozen=True, kw_only=True):
    """The estimates of a run and of its tasks, least recently seen task first. A part of the trainer's state.

    Keys are digests of the tasks' names, because names may be long texts and may have to be erased.
    """

    decay: float
    run: Scope = Scope()
    tasks: dict[str, Scope] = {}

    @staticmethod
    def fresh(decay: float) -> RunningMeans:
        """Return the estimates of a run that has seen no reward."""
        return RunningMeans(decay=decay)

    def baseline(self, task: str | None, place: int) -> float:
        """Return the running baseline of a place. It is 0 before the first value, so that a first reward pushes in
        the direction of its sign."""
        run = self.run.at(place).mean
        own = self._scope(task).at(place)
        if own.weight == 0:
            return run
        return own.mean + SHRINKAGE / (own.seen + SHRINKAGE) * deviation(run, own.mean)

    def after(self, batch: Sequence[Observation]) -> RunningMeans:
        """Return the estimates after a batch."""
        run = self.run.updated(_by_place(batch), partial(self.baseline, None), self.decay)
        tasks = dict(self.tasks)
        for task, members in _by_task(batch).items():
            name = digest(task)
            before = tasks.pop(name, Scope())  # It goes to the end: dicts keep the order of insertion.
            tasks[name] = before.updated(_by_place(members), partial(self.baseline, task), self.decay)
        return RunningMeans(decay=self.decay, run=run, tasks=_bounded(tasks))

    def meet(self, batch: Sequence[Observation]) -> list[Met]:
        """Compare each observation of a batch with the running estimates.

        The scale includes the batch itself. It is 0 only if the deviations are 0 too.
        """
        run = self._squares(None, _by_place(batch))
        scales: dict[str | None, float] = {None: math.sqrt(sum(part.square for part in run))}
        for task, members in _by_task(batch).items():
            own = self._squares(task, _by_place(members))
            scales[task] = math.sqrt(sum(_shrunk(mine, whole) for mine, whole in zip(own, run, strict=True)))
        return [Met(deviation(each.value, self.baseline(each.task, each.place)), scales[each.task]) for each in batch]

    def _scope(self, task: str | None) -> Scope:
        """Return a task's own estimates, which are empty for an unknown task and for None."""
        return Scope() if task is None else self.tasks.get(digest(task), Scope())

    def _squares(self, task: str | None, values: Mapping[int, Sequence[float]]) -> tuple[_Part, _Part]:
        """Return two mean squares that include the batch: of sessions' rewards, and of turns' returns at all
        positions together. They are those of `task`, or of the whole run if it is None."""
        scope = self.run if task is None else self._scope(task)
        parts: dict[int, _Part] = {}
        for place in (SESSION, *range(MOST_POSITIONS)):
            before, baseline = scope.at(place), self.baseline(task, place)
            if place in values:
                after = before.updated(values[place], baseline, self.decay)
                square = before.square_with(values[place], baseline, self.decay)
                parts[place] = _Part(after.weight, square, after.seen)
            else:
                parts[place] = _Part(before.weight, before.square, before.seen)
        session = parts.pop(SESSION)
        total = math.fsum(part.weight for part in parts.values())
        pooled = math.fsum(part.weight * part.square for part in parts.values()) / total if total else 0.0
        return session, _Part(total, pooled, max(part.seen for part in parts.values()))

    def as_json(self) -> dict[str, Any]:
        """Return the estimates for the trainer's state, in which JSON keeps the order of the tasks. The decay is not
        included: it comes from the configuration."""
        return {"run": msgspec.to_builtins(self.run), "tasks": msgspec.to_builtins(self.tasks)}

    @staticmethod
    def from_json(decay: float, plain: Mapping[str, Any]) -> RunningMeans:
        """Read the estimates in a trainer's state. Raises WeightsUnusable if there are none.

        States of earlier trainers have means without spreads. Their session mean counts as one trajectory, so that
        the first batch replaces it; their turn mean is dropped, because it did not include the rewards of later
        turns.
        """
        try:
            if lacks_spreads(plain):
                known = plain["session"]
                session = Estimate() if known is None else Estimate(1.0, float(known), 0.0, 1)
                return RunningMeans(decay=decay, run=Scope(session=session))
            return msgspec.convert({"decay": decay, "run": plain["run"], "tasks": plain["tasks"]}, RunningMeans)
        except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
            raise WeightsUnusable(f"the running means of the trainer state cannot be read: {error}") from error


def lacks_spreads(plain: Mapping[str, Any]) -> bool:
    """Whether an earlier trainer, which recorded means only, wrote these estimates."""
    return "run" not in plain


def digest(task: str) -> str:
    """Return the key of a task's estimates."""
    kind = _FIRST_MESSAGE if task.startswith(_MARK) else ""
    return kind + hashlib.sha256(task.encode()).hexdigest()[:32]


def task_of(trajectory: Trajectory, task_by: TaskBy) -> str | None:
    """Return the task whose estimates the trajectory shares: the one it names, else with `first_message` the first
    message of its user. None: it is compared with the run."""
    if trajectory.task is not None or task_by is TaskBy.NAME or trajectory.first_message is None:
        return trajectory.task
    return _MARK + trajectory.first_message.hex()


def _bounded(tasks: dict[str, Scope]) -> dict[str, Scope]:
    """Return the tasks without the least recently seen ones beyond the bound of their kind."""
    for kind in (True, False):
        names = [name for name in tasks if name.startswith(_FIRST_MESSAGE) is kind]
        for name in names[: max(0, len(names) - MOST_TASKS)]:
            del tasks[name]
    return tasks


class _Part(NamedTuple):
    weight: float
    square: float
    seen: int


def _shrunk(own: _Part, run: _Part) -> float:
    """Return a task's mean square with its logarithm shrunk towards that of the run."""
    if own.seen == 0:
        return run.square
    if own.square == 0 or run.square == 0:  # Nothing differs yet, in the task or in the run: no logarithm.
        return own.square
    share = own.seen / (own.seen + SHRINKAGE)
    return math.exp(share * math.log(own.square) + (1 - share) * math.log(run.square))


def _by_place(batch: Sequence[Observation]) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for each in batch:
        values.setdefault(min(each.place, MOST_POSITIONS - 1), []).append(each.value)
    return values


def _by_task(batch: Sequence[Observation]) -> dict[str, list[Observation]]:
    members: dict[str, list[Observation]] = {}
    for each in batch:
        if each.task is not None:
            members.setdefault(each.task, []).append(each)
    return members
