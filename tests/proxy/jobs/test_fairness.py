from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.jobs.fairness import fair_order, rotated

RUNS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 12), max_size=6)


@given(waiting=RUNS, running=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5)), want=st.integers(0, 40))
def test_nobody_gets_two_more_than_a_run_that_still_waits(
    waiting: dict[str, int], running: dict[str, int], want: int
) -> None:
    jobs = {run: [f"{run}{number}" for number in range(count)] for run, count in waiting.items()}
    chosen = fair_order(jobs, running, want)
    assert len(chosen) == len(set(chosen)) == min(want, sum(waiting.values()))
    by_run = Counter(job[0] for job in chosen)
    for run, taken in by_run.items():
        assert [job for job in chosen if job[0] == run] == jobs[run][:taken]
        for other, count in waiting.items():
            if by_run[other] < count:  # it still waits: nobody passed it by more than one
                assert running.get(run, 0) + taken <= running.get(other, 0) + by_run[other] + 1


@given(runs=st.lists(st.text(max_size=3), unique=True).map(sorted), after=st.none() | st.text(max_size=3))
def test_a_rotation_has_every_run_once_and_begins_behind_the_last_one(runs: list[str], after: str | None) -> None:
    turned = rotated(runs, after)
    assert sorted(turned) == runs
    later = [run for run in runs if after is not None and run > after]
    if later:
        assert turned[0] == later[0]
