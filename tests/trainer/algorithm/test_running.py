"""Compare running estimates with their definition, written out over every value ever seen."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.tiny import trajectory, turn
from trainer.algorithm import running
from trainer.algorithm.running import SESSION, Observation, RunningMeans
from trainer.config import TaskBy
from trainer.errors import WeightsUnusable

DECAY = 0.9
K = 8.0

rewards = st.floats(-100, 100).map(lambda value: round(value, 3))
observations = st.builds(
    Observation, task=st.sampled_from([None, "a", "b"]), place=st.sampled_from([SESSION, 0, 1]), value=rewards
)
batches = st.lists(st.lists(observations, max_size=6), max_size=5)


class Reference:
    """Mean and mean square of one scope and position: sums over all batches, each with its current weight."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, float, float]] = []
        """(values, their mean, their mean squared deviation from the baseline), oldest first."""

    def add(self, values: list[float], met: float) -> None:
        mean = math.fsum(values) / len(values)
        centre = met if self.batches else mean
        square = math.fsum((value - centre) ** 2 for value in values) / len(values)
        self.batches.append((len(values), mean, square))

    def weights(self) -> list[float]:
        """Return the sum of δ⁰ … δᴺ⁻¹ for a batch's N values, times δ for every later value."""
        counts = [count for count, _, _ in self.batches]
        return [
            sum(DECAY**power for power in range(count)) * DECAY ** sum(counts[at + 1 :])
            for at, count in enumerate(counts)
        ]

    @property
    def count(self) -> int:
        return sum(count for count, _, _ in self.batches)

    @property
    def weight(self) -> float:
        return sum(self.weights())

    @property
    def mean(self) -> float:
        parts = zip(self.weights(), self.batches, strict=True)
        return sum(weight * mean for weight, (_, mean, _) in parts) / self.weight if self.batches else 0.0

    @property
    def square(self) -> float:
        parts = zip(self.weights(), self.batches, strict=True)
        return sum(weight * square for weight, (_, _, square) in parts) / self.weight if self.batches else 0.0


def references(history: list[list[Observation]]) -> dict[tuple[str | None, int], Reference]:
    """Return references by task (None: the run) and position, after these batches."""
    found: dict[tuple[str | None, int], Reference] = {}

    def scope(task: str | None, place: int) -> Reference:
        return found.setdefault((task, place), Reference())

    for batch in history:
        places: dict[tuple[str | None, int], list[float]] = {}
        for each in batch:
            for task in {None, each.task}:
                places.setdefault((task, each.place), []).append(each.value)
        met = {key: baseline(found, *key) for key in places}
        for key, values in places.items():
            scope(*key).add(values, met[key])
    return found


def baseline(known: dict[tuple[str | None, int], Reference], task: str | None, place: int) -> float:
    run = known.get((None, place), Reference())
    own = known.get((task, place), Reference())
    if task is None or not own.batches:
        return run.mean
    return (own.count * own.mean + K * run.mean) / (own.count + K)


@given(batches)
def test_baselines_against_the_definition(history: list[list[Observation]]) -> None:
    means = RunningMeans.fresh(DECAY)
    for batch in history:
        means = means.after(batch)
    known = references(history)
    for task in (None, "a", "b", "never seen"):
        for place in (SESSION, 0, 1, 2):
            assert means.baseline(task, place) == pytest.approx(baseline(known, task, place), abs=1e-6)


@given(batches, st.lists(observations, min_size=1, max_size=6))
def test_scales_against_the_definition(history: list[list[Observation]], batch: list[Observation]) -> None:
    means = RunningMeans.fresh(DECAY)
    for each in history:
        means = means.after(each)
    before = references(history)

    def squares(task: str | None) -> list[tuple[int, float]]:
        """Return (number of values, mean square) of sessions and of turns, including the batch's."""
        found: dict[int, tuple[float, float, int]] = {}
        for place in (SESSION, 0, 1):
            own = before.get((task, place), Reference())
            here = [each.value for each in batch if each.place == place and task in (None, each.task)]
            if here:
                met = baseline(before, task, place)
                own.batches.append((len(here), 0.0, math.fsum((value - met) ** 2 for value in here) / len(here)))
            found[place] = (own.weight, own.square, own.count)
            if here:
                own.batches.pop()
        turns = [found[0], found[1]]
        total = sum(weight for weight, _, _ in turns)
        pooled = sum(weight * square for weight, square, _ in turns) / total if total else 0.0
        return [(found[SESSION][2], found[SESSION][1]), (max(count for _, _, count in turns), pooled)]

    for one, met in zip(batch, means.meet(batch), strict=True):
        run = squares(None)
        wanted = 0.0
        if one.task is None:
            wanted = sum(square for _, square in run)
        else:
            for (count, square), (_, whole) in zip(squares(one.task), run, strict=True):
                if not count:
                    wanted += whole
                elif min(square, whole) < 1e-12:
                    wanted += square
                else:
                    wanted += square ** (count / (count + K)) * whole ** (K / (count + K))
        assert met.scale == pytest.approx(math.sqrt(wanted), rel=1e-6, abs=1e-5)
        assert met.deviation == pytest.approx(one.value - baseline(before, one.task, one.place), abs=1e-6)


@given(batches, st.lists(observations, min_size=1, max_size=6))
def test_a_deviation_is_never_divided_by_nothing(history: list[list[Observation]], batch: list[Observation]) -> None:
    means = RunningMeans.fresh(DECAY)
    for each in history:
        means = means.after(each)
    assert all(met.scale > 0 or met.deviation == 0 for met in means.meet(batch))


@given(st.floats(-1e6, 1e6), st.lists(st.integers(1, 7), min_size=1, max_size=9))
def test_equal_rewards_are_exactly_their_mean(value: float, sizes: list[int]) -> None:
    means = RunningMeans.fresh(DECAY)
    for size in sizes:
        means = means.after([Observation("a", SESSION, value)] * size + [Observation(None, SESSION, value)])
    for task in (None, "a", "b"):
        assert [met.deviation for met in means.meet([Observation(task, SESSION, value)])] == [0.0]


@given(batches, st.floats(0.001, 1000), st.floats(-1000, 1000))
def test_another_unit_and_another_zero_change_nothing(
    history: list[list[Observation]], factor: float, shift: float
) -> None:
    """The test compares deviations in units of their scale once something was seen; the zero of the first batch is
    the user's."""

    def moved(batch: list[Observation]) -> list[Observation]:
        return [each._replace(value=factor * each.value + shift) for each in batch]

    first = [Observation(task, place, 7.0 * place) for task in (None, "a", "b") for place in (SESSION, 0, 1)]
    plain, other = (RunningMeans.fresh(DECAY).after(batch) for batch in (first, moved(first)))
    for batch in history:
        for mine, theirs in zip(plain.meet(batch), other.meet(moved(batch)), strict=True):
            assert theirs.deviation == pytest.approx(factor * mine.deviation, abs=1e-9 * (factor + abs(shift)))
            assert theirs.scale == pytest.approx(factor * mine.scale, rel=1e-6, abs=1e-6 * (factor + abs(shift)))
        plain, other = plain.after(batch), other.after(moved(batch))


def test_a_task_of_small_rewards_is_measured_in_its_own_unit() -> None:
    """Another task has rewards a hundred times as large."""
    means = RunningMeans.fresh(0.99)
    both = [(task, factor * reward) for task, factor in (("small", 1.0), ("large", 100.0)) for reward in (0.0, 1.0)]
    batch = [Observation(task, SESSION, reward) for task, reward in both] * 10
    for _ in range(100):
        means = means.after(batch)
    good = [Observation("small", SESSION, 1.0), Observation("large", SESSION, 100.0)]
    assert [met.deviation / met.scale for met in means.meet(good)] == pytest.approx([1.0, 1.0], abs=0.25)


def test_estimates_survive_being_written_down() -> None:
    means = RunningMeans.fresh(DECAY).after([Observation("a/b", SESSION, 0.1), Observation(None, 3, 1 / 3)])
    written = json.loads(json.dumps(means.as_json()))
    assert RunningMeans.from_json(DECAY, written) == means
    assert "a/b" not in json.dumps(written)


def test_the_task_not_seen_for_the_longest_time_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MOST_TASKS", 2)
    means = RunningMeans.fresh(DECAY)
    for task in ("a", "b", "a", "c"):
        means = RunningMeans.from_json(DECAY, means.after([Observation(task, SESSION, 1.0)]).as_json())
    assert list(means.tasks) == [running.digest("a"), running.digest("c")]


def test_first_messages_leave_the_estimates_of_named_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live traffic has any number of first messages."""
    monkeypatch.setattr(running, "MOST_TASKS", 2)
    named, asking = (msgspec.structs.replace(trajectory(turn([4])), **parts) for parts in ({"task": "a"}, {}))
    means = RunningMeans.fresh(DECAY)
    for each in (named, *(msgspec.structs.replace(asking, first_message=bytes([byte])) for byte in range(5))):
        means = means.after([Observation(running.task_of(each, TaskBy.FIRST_MESSAGE), SESSION, 1.0)])
    assert len(means.tasks) == 3
    assert next(iter(means.tasks)) == running.digest("a")


def test_positions_far_along_a_path_share_estimates() -> None:
    means = RunningMeans.fresh(DECAY).after([Observation(None, 15, 1.0), Observation(None, 1_000_000, 3.0)])
    assert means.baseline(None, 15) == means.baseline(None, 40) == 2.0
    assert len(means.run.turns) == running.MOST_POSITIONS


def test_a_state_of_means_alone_counts_as_one_trajectory() -> None:
    means = RunningMeans.from_json(DECAY, {"session": 0.5, "turn": 3.0})
    assert (means.baseline(None, SESSION), means.baseline(None, 0)) == (0.5, 0.0)
    after = means.after([Observation(None, SESSION, 1.0)])
    assert after.baseline(None, SESSION) == pytest.approx((0.9 * 0.5 + 1.0) / 1.9)
    assert RunningMeans.from_json(DECAY, {"session": None, "turn": None}) == RunningMeans.fresh(DECAY)


@pytest.mark.parametrize("plain", [{}, {"session": "much"}, {"run": {}, "tasks": 3}, {"run": {"session": ["x"]}}])
def test_a_state_that_is_none_is_refused(plain: dict[str, object]) -> None:
    with pytest.raises(WeightsUnusable, match="running means"):
        RunningMeans.from_json(DECAY, plain)
