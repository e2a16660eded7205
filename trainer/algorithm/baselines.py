"""Advantages of a batch's rewards: their deviations from a baseline, divided by a scale. Pure, in float64.

A reward has a place in its trajectory: the session's, or the position on its path of the turn whose return-to-go it
is. It is compared with its cohort: the rewards at the same place in its group, or in the batch. If a cohort has only
one trajectory, the reward is compared with the running estimates instead (`algorithm/running.py`), for baseline and
scale. Rewards of several answers to one prompt are a cohort of their own, under every baseline.

A trajectory has one scale, for its session's reward and its turns' returns:

    scale² = mean squared deviation of the sessions' rewards + that of the turns' returns, all positions pooled

over its group with `group_std`, over the batch with `batch_std`, over the run (and its task) with `running_std`. Both
kinds of reward are in one unit, the user's: a point given to a turn weighs as much as a point given to a session.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.algorithm.rounding import deviations
from trainer.algorithm.running import SESSION, Met, Observation, RunningMeans
from trainer.config import Baseline, Scale

_OF_GROUPS = (Baseline.GROUP_MEAN, Baseline.LEAVE_ONE_OUT)
_OF_COHORTS = (*_OF_GROUPS, Baseline.BATCH_MEAN)
# Placeholder for answers to one prompt, which are compared with each other and not with the running estimates.
_NOT_MET = Met(0.0, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewarded:
    """A session's reward (`place` is SESSION) or a turn's return (`place` is its position), already shaped.

    `trajectory` is an index into the batch, and `group` is equal for members of one group. `siblings` is equal for
    answers to one prompt of the trajectory, which are compared with each other; None for a reward compared by place.
    """

    trajectory: int
    group: int
    task: str | None
    place: int
    value: float
    siblings: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The comparison of a batch's rewards.

    `advantages[i]` belongs to the i-th reward. `alone[i]` is True if that reward had no cohort and was compared with
    the running estimates. `means` are the running estimates after the batch.
    """

    advantages: tuple[float, ...]
    alone: tuple[bool, ...]
    means: RunningMeans


def compare(rewards: Sequence[Rewarded], baseline: Baseline, scale: Scale, means: RunningMeans) -> Compared:
    """Return the advantages of a batch's rewards. Rewards that equal their baseline have exactly 0."""
    batch = [Observation(each.task, each.place, each.value) for each in rewards if each.siblings is None]
    in_order = iter(means.meet(batch))
    met = [next(in_order) if each.siblings is None else _NOT_MET for each in rewards]
    found, alone = _deviations(rewards, baseline, met)
    scales = _scales(rewards, baseline, scale, found, alone, met)
    return Compared(
        advantages=tuple(
            each / divisor if each and divisor else 0.0 for each, divisor in zip(found, scales, strict=True)
        ),
        alone=tuple(alone),
        means=means.after(batch),
    )


def _deviations(
    rewards: Sequence[Rewarded], baseline: Baseline, met: Sequence[Met]
) -> tuple[list[float], list[bool]]:
    """Return each reward's deviation from its baseline, and whether it had no cohort.

    The mean of the others differs from the mean of all n by a factor: r − mean of others = (r − mean)·n / (n − 1).
    """
    by_place = baseline in _OF_COHORTS
    if by_place or baseline is Baseline.RUNNING_MEAN:
        found = [one.deviation for one in met]
    else:  # A critic's baseline is per token, and taken away later.
        found = [each.value for each in rewards]
    alone = [by_place] * len(rewards)
    for cohort, members in _cohorts(rewards, grouped=baseline in _OF_GROUPS).items():
        if by_place or cohort.siblings is not None:
            factor = len(members) / (len(members) - 1) if baseline is Baseline.LEAVE_ONE_OUT else 1.0
            for index, each in zip(members, deviations([rewards[at].value for at in members]), strict=True):
                found[index], alone[index] = factor * each, False
    return found, alone


def _scales(
    rewards: Sequence[Rewarded],
    baseline: Baseline,
    scale: Scale,
    found: Sequence[float],
    alone: Sequence[bool],
    met: Sequence[Met],
) -> list[float]:
    """Return the divisor of each deviation.

    A reward without a cohort is divided by the running scale: its deviation is not part of any cohort's spread, and
    could be any multiple of that. For the same reason answers to one prompt are divided by their group's scale.
    """
    if scale is Scale.NONE or baseline is Baseline.CRITIC:
        return [1.0] * len(rewards)
    trajectories = len({each.trajectory for each in rewards})
    if scale is Scale.TOKEN_STD and trajectories > 1:
        return [1.0] * len(rewards)  # tokens are normalised later, over the batch (`whitening.py`)
    if scale is Scale.BATCH_STD and baseline not in _OF_COHORTS and (baseline is Baseline.NONE or trajectories > 1):
        return [_around(rewards, found)] * len(rewards)
    runs = scale is Scale.RUNNING_STD or baseline is Baseline.RUNNING_MEAN
    grouped = runs or scale is Scale.GROUP_STD
    spreads = _spreads(rewards, grouped=grouped)
    return [
        one.scale if lone or (runs and each.siblings is None) else spreads[each.group if grouped else None]
        for each, lone, one in zip(rewards, alone, met, strict=True)
    ]


def _around(rewards: Sequence[Rewarded], found: Sequence[float]) -> float:
    """Return the scale of a batch whose baseline is not its own mean: root mean squares of the deviations."""
    sessions, turns = (
        [one**2 for each, one in zip(rewards, found, strict=True) if (each.place == SESSION) is of_session]
        for of_session in (True, False)
    )
    return _root(sessions, turns)


def _spreads(rewards: Sequence[Rewarded], *, grouped: bool) -> dict[int | None, float]:
    """Return the scale of each group, or of the batch under None."""
    squares: dict[int | None, tuple[list[float], list[float]]] = {
        each.group if grouped else None: ([], []) for each in rewards
    }
    for cohort, members in _cohorts(rewards, grouped=grouped).items():
        group = rewards[members[0]].group if grouped else None
        squares[group][cohort.place != SESSION].extend(
            each**2 for each in deviations([rewards[at].value for at in members])
        )
    return {group: _root(*both) for group, both in squares.items()}


def _root(sessions: Sequence[float], turns: Sequence[float]) -> float:
    """Return the root of the sum of both mean squares."""
    return math.sqrt(sum(math.fsum(squares) / max(1, len(squares)) for squares in (sessions, turns)))


class _Cohort(NamedTuple):
    """The key of a cohort. `group` is None for the whole batch; `siblings` is None for rewards compared by place."""

    group: int | None
    place: int
    trajectory: int | None = None
    siblings: int | None = None


def _cohorts(rewards: Sequence[Rewarded], *, grouped: bool) -> dict[_Cohort, list[int]]:
    """Return the indices of the rewards in each cohort.

    A cohort by place needs several trajectories: branches of one session are not compared with each other.
    """
    found: dict[_Cohort, list[int]] = {}
    for index, each in enumerate(rewards):
        if each.siblings is None:
            cohort = _Cohort(each.group if grouped else None, each.place)
        else:
            cohort = _Cohort(each.group, each.place, each.trajectory, each.siblings)
        found.setdefault(cohort, []).append(index)
    return {
        cohort: members
        for cohort, members in found.items()
        if cohort.siblings is not None or len({rewards[index].trajectory for index in members}) > 1
    }
