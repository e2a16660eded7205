"""Compare advantages of batches with their definition, cohort by cohort, in plain float64 arithmetic."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.baselines import Rewarded, compare
from trainer.algorithm.running import SESSION, Observation, RunningMeans
from trainer.config import Baseline, Scale

SEEN = [Observation(None, place, value) for place in (SESSION, 0, 1) for value in (2.0, 5.0)]
MEANS = RunningMeans.fresh(0.9).after(SEEN)
COHORTS = [
    (baseline, scale)
    for baseline in (Baseline.GROUP_MEAN, Baseline.LEAVE_ONE_OUT, Baseline.BATCH_MEAN)
    for scale in Scale
    if not (baseline is Baseline.BATCH_MEAN and scale is Scale.GROUP_STD)
    and scale is not Scale.TOKEN_STD  # which leaves the division to the learner
]
OTHERS = [
    *((Baseline.RUNNING_MEAN, scale) for scale in (Scale.RUNNING_STD, Scale.BATCH_STD, Scale.NONE)),
    *((Baseline.NONE, scale) for scale in (Scale.BATCH_STD, Scale.NONE)),
    (Baseline.CRITIC, Scale.BATCH_STD),
]

values = st.floats(-10, 10).map(lambda value: round(value, 2))


@st.composite
def rewards(draw: st.DrawFn) -> list[Rewarded]:
    """Groups of any size; sessions and turns with and without rewards."""
    found = []
    trajectory = 0
    for group, size in enumerate(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))):
        for _ in range(size):
            for place in sorted(draw(st.sets(st.sampled_from([SESSION, 0, 1, 2])))):
                found.append(Rewarded(trajectory=trajectory, group=group, task=None, place=place, value=draw(values)))
            trajectory += 1
    return found


def spread(cohorts: dict[int, list[float]]) -> float:
    """Return population variances by position, for trajectories with at least one reward: the session's, and the
    turns' pooled."""
    compared = {place: each for place, each in cohorts.items() if len(each) > 1}
    variance = statistics.pvariance(compared[SESSION]) if SESSION in compared else 0.0
    turns = [each for place, each in compared.items() if place != SESSION]
    if turns:
        variance += sum(len(each) * statistics.pvariance(each) for each in turns) / sum(map(len, turns))
    return math.sqrt(variance)


@given(rewards(), st.sampled_from(COHORTS))
def test_cohorts_against_the_definition(batch: list[Rewarded], parts: tuple[Baseline, Scale]) -> None:
    baseline, scale = parts
    compared = compare(batch, baseline, scale, MEANS)
    running = MEANS.meet([Observation(None, each.place, each.value) for each in batch])
    for index, each in enumerate(batch):
        mates = [one for one in batch if baseline is Baseline.BATCH_MEAN or one.group == each.group]
        cohort = [one.value for one in mates if one.place == each.place]
        alone = len(cohort) == 1
        assert compared.alone[index] is alone
        others = [one.value for one in mates if one.place == each.place and one is not each]
        mean = statistics.fmean((others or cohort) if baseline is Baseline.LEAVE_ONE_OUT else cohort)
        deviation = running[index].deviation if alone else each.value - mean
        whole = [one for one in batch if scale is Scale.BATCH_STD or one.group == each.group]
        divisor = 1.0
        if scale is Scale.RUNNING_STD or (alone and scale is not Scale.NONE):
            divisor = running[index].scale
        elif scale is not Scale.NONE:
            divisor = spread({place: [one.value for one in whole if one.place == place] for place in range(-1, 3)})
        wanted = deviation / divisor if abs(deviation) > 1e-9 else 0.0
        assert compared.advantages[index] == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@given(rewards(), st.sampled_from(OTHERS))
def test_baselines_without_cohorts_against_the_definition(
    batch: list[Rewarded], parts: tuple[Baseline, Scale]
) -> None:
    baseline, scale = parts
    compared = compare(batch, baseline, scale, MEANS)
    assert not any(compared.alone)
    running = MEANS.meet([Observation(None, each.place, each.value) for each in batch])
    found = [
        met.deviation if baseline is Baseline.RUNNING_MEAN else each.value
        for each, met in zip(batch, running, strict=True)
    ]
    squares: dict[bool, list[float]] = {True: [], False: []}
    for each, one in zip(batch, found, strict=True):
        squares[each.place == SESSION].append(one**2)
    means = [statistics.fmean(each or [0.0]) for each in squares.values()]
    lone = len({each.trajectory for each in batch}) == 1 and baseline is Baseline.RUNNING_MEAN
    for index, one in enumerate(found):
        divisor = math.sqrt(sum(means)) or 1.0
        if scale is Scale.RUNNING_STD or (lone and scale is Scale.BATCH_STD):
            divisor = running[index].scale
        elif scale is Scale.NONE or baseline is Baseline.CRITIC:
            divisor = 1.0
        assert compared.advantages[index] == pytest.approx(one / divisor, rel=1e-6, abs=1e-6)


@given(rewards(), st.sampled_from([*COHORTS, *OTHERS]))
def test_no_advantage_is_out_of_scale(batch: list[Rewarded], parts: tuple[Baseline, Scale]) -> None:
    """Of n rewards none is further from their mean than √n standard deviations; a single one, than √11 of this
    run's."""
    baseline, scale = parts
    if scale in (Scale.NONE, Scale.RUNNING_STD) or baseline is Baseline.CRITIC:
        return
    for each in compare(batch, baseline, scale, MEANS).advantages:
        assert abs(each) <= 2 * math.sqrt(len(batch) + 11)


@given(rewards(), st.sampled_from(COHORTS), st.floats(1e-6, 1e6), st.floats(-1e3, 1e3))
def test_what_is_divided_by_its_spread_has_no_unit_and_no_zero(
    batch: list[Rewarded], parts: tuple[Baseline, Scale], factor: float, shift: float
) -> None:
    baseline, scale = parts
    if scale in (Scale.NONE, Scale.RUNNING_STD):
        return
    moved = [
        Rewarded(
            trajectory=each.trajectory,
            group=each.group,
            task=None,
            place=each.place,
            value=factor * (each.value + shift),
        )
        for each in batch
    ]
    mine, theirs = compare(batch, baseline, scale, MEANS), compare(moved, baseline, scale, MEANS)
    for plain, other, alone in zip(mine.advantages, theirs.advantages, mine.alone, strict=True):
        assert alone or other == pytest.approx(plain, abs=1e-9)


@pytest.mark.parametrize("baseline", list(Baseline))
@pytest.mark.parametrize("scale", list(Scale))
def test_an_empty_batch_is_no_error(baseline: Baseline, scale: Scale) -> None:
    compared = compare([], baseline, scale, MEANS)
    assert (compared.advantages, compared.means) == ((), MEANS)


def test_branches_of_one_session_do_not_compete() -> None:
    """Two turns at one position of one trajectory are not a cohort; another member's turn makes them one."""
    mine = [Rewarded(trajectory=0, group=0, task=None, place=1, value=value) for value in (1.0, 3.0)]
    other = Rewarded(trajectory=1, group=0, task=None, place=1, value=5.0)
    assert compare(mine, Baseline.GROUP_MEAN, Scale.NONE, MEANS).alone == (True, True)
    assert compare([*mine, other], Baseline.GROUP_MEAN, Scale.NONE, MEANS).advantages == (-2.0, 0.0, 2.0)
