"""Shares of time, whatever the order of arrivals and the length of steps."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from trainer.runtime.fairness import FairShare

RUNS = ("a", "b", "c", "d")

Turn = tuple[frozenset[str], frozenset[str], float]
"""(runs with a batch, runs that may get one shortly, seconds of the step)"""

SOME = st.frozensets(st.sampled_from(RUNS))
SECONDS = st.floats(min_value=0.0, max_value=100.0, allow_nan=False)
TURNS = st.lists(st.tuples(SOME, SOME, SECONDS), max_size=60)


def play(turns: Sequence[Turn], share: FairShare | None = None) -> list[tuple[str | None, float]]:
    """Return the run that was chosen at each turn, with its seconds. Without a `share`, all weights are equal."""
    share = share or equal()
    course: list[tuple[str | None, float]] = []
    for ready, undecided, seconds in turns:
        chosen = share.choose(ready, undecided - ready)
        if chosen is not None:
            share.spend(chosen, seconds)
        course.append((chosen, seconds))
    return course


def equal() -> FairShare:
    return FairShare(dict.fromkeys(RUNS, 1.0))


def had(run: str, course: Sequence[tuple[str | None, float]]) -> float:
    return sum(seconds for chosen, seconds in course if chosen == run)


def longest(course: Sequence[tuple[str | None, float]], *runs: str) -> float:
    return max((seconds for chosen, seconds in course if chosen in runs), default=0.0)


@given(TURNS)
def test_two_runs_that_are_always_ready_differ_by_at_most_a_step(turns: list[Turn]) -> None:
    course = play([(ready | {"a", "b"}, undecided, seconds) for ready, undecided, seconds in turns])
    for end in range(len(course) + 1):
        done = course[:end]
        assert abs(had("a", done) - had("b", done)) <= longest(done, "a", "b") + 1e-9


@given(TURNS, st.tuples(*[st.floats(min_value=0.01, max_value=100.0)] * len(RUNS)))
def test_two_runs_that_are_always_ready_share_time_by_weight(turns: list[Turn], weights: tuple[float, ...]) -> None:
    """Their seconds per weight are within the longest step per weight of each other, whatever the others do."""
    by_run = dict(zip(RUNS, weights, strict=True))
    course = play(
        [(ready | {"a", "b"}, undecided, seconds) for ready, undecided, seconds in turns], FairShare(by_run)
    )
    for end in range(len(course) + 1):
        done = course[:end]
        shares = [had(run, done) / by_run[run] for run in "ab"]
        bound = max(longest(done, run) / by_run[run] for run in "ab")
        assert abs(shares[0] - shares[1]) <= bound + 1e-9 * (1 + sum(shares))


def test_a_run_of_twice_the_weight_has_twice_the_turns() -> None:
    course = play([(frozenset("ab"), frozenset(), 1.0)] * 9, FairShare({"a": 2.0, "b": 1.0}))
    assert (had("a", course), had("b", course)) == (6.0, 3.0)


def test_a_run_that_joins_later_has_no_credit() -> None:
    share = FairShare({"a": 1.0})
    play([(frozenset("a"), frozenset(), 50.0)] * 3, share)
    share.join("late", 1.0)
    course = play([(frozenset({"a", "late"}), frozenset(), 10.0)] * 20, share)
    assert abs(had("late", course) - had("a", course)) <= 50.0


@given(TURNS, TURNS)
def test_a_run_that_was_idle_has_no_credit(before: list[Turn], after: list[Turn]) -> None:
    """Over any period in which both are ready, their times differ by at most a step, whatever happened before: a run
    that was idle for long does not catch up."""
    share = equal()
    earlier = play([(ready - {"b"}, undecided - {"b"}, seconds) for ready, undecided, seconds in before], share)
    course = play([(ready | {"a", "b"}, undecided, seconds) for ready, undecided, seconds in after], share)
    for end in range(len(course) + 1):
        done = course[:end]
        bound = longest([*earlier, *done], "a") + longest([*earlier, *done], "b")
        bound += longest([*earlier, *done], "c", "d")
        assert abs(had("a", done) - had("b", done)) <= bound + 1e-9


@given(TURNS)
def test_a_run_is_chosen_whenever_none_is_undecided(turns: list[Turn]) -> None:
    for (ready, _, _), (chosen, _) in zip(turns, play([(r, frozenset(), s) for r, _, s in turns]), strict=True):
        assert (chosen in ready) if ready else (chosen is None)


@given(TURNS, SOME, SOME)
def test_only_an_undecided_run_that_would_be_first_is_waited_for(
    turns: list[Turn], ready: frozenset[str], asked: frozenset[str]
) -> None:
    """The choice is the same as if it had been known from the start whether the undecided runs get a batch."""
    asked -= ready

    def choice(ready: frozenset[str], undecided: frozenset[str]) -> str | None:
        share = equal()
        play(turns, share)
        return share.choose(ready, undecided)

    known = choice(ready | asked, frozenset())
    assert choice(ready, asked) == (known if known in ready else None)


def test_equal_times_take_turns() -> None:
    course = play([(frozenset(RUNS), frozenset(), 0.0)] * 8)
    assert [chosen for chosen, _ in course] == [*RUNS, *RUNS]


def test_a_run_that_ended_is_never_chosen() -> None:
    share = equal()
    share.leave("a")
    assert [chosen for chosen, _ in play([(frozenset("bcd"), frozenset(), 1.0)] * 3, share)] == ["b", "c", "d"]
