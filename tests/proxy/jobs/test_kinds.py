from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.jobs.kinds import JobKind, JobKinds, Schedule
from tests.proxy.jobs.world import complete

KIND = JobKind(name="it", handler=complete, backoff_seconds=2.0, longest_backoff_seconds=900.0)


@given(attempt=st.integers(1, 5000), fraction=st.floats(0, 1))
def test_pauses_double_up_to_the_longest_and_are_spread_over_half_of_it(attempt: int, fraction: float) -> None:
    longest = min(900.0, 2.0 * 2.0 ** min(attempt - 1, 100))
    assert longest / 2 <= KIND.pause_after(attempt, fraction) <= longest
    assert longest / 2 <= KIND.pause_after(attempt) <= longest


@given(
    now=st.floats(1e9, 3e9),
    every=st.floats(1, 1e6),
    offset=st.floats(0, 0.99),
)
def test_a_tick_is_the_last_multiple_behind_the_offset(now: float, every: float, offset: float) -> None:
    schedule = Schedule(name="s", kind="it", every_seconds=every, offset_seconds=offset * every)
    tick = schedule.tick(now)
    assert -0.01 <= now - tick <= every + 0.01
    assert schedule.tick(tick + every * 0.5) == pytest.approx(tick, abs=0.01)


def test_every_night_at_three() -> None:
    nightly = Schedule(name="s", kind="it", every_seconds=86400, offset_seconds=3 * 3600)
    assert nightly.tick(86400 * 10 + 3 * 3600 - 1) == 86400 * 9 + 3 * 3600
    assert nightly.tick(86400 * 10 + 3 * 3600) == 86400 * 10 + 3 * 3600


def test_wrong_kinds_and_schedules_are_refused() -> None:
    kinds = JobKinds([KIND])
    with pytest.raises(ValueError, match="already a kind"):
        kinds.register(KIND)
    with pytest.raises(ValueError, match="unknown kind"):
        kinds.add_schedule(Schedule(name="s", kind="other", every_seconds=5))
    with pytest.raises(ValueError, match="above 0"):
        JobKind(name="it", handler=complete, attempts=0)
    with pytest.raises(ValueError, match="every_seconds"):
        Schedule(name="s", kind="it", every_seconds=5, offset_seconds=5)
    kinds.add_schedule(Schedule(name="s", kind="it", every_seconds=5))
    with pytest.raises(ValueError, match="already a schedule"):
        kinds.add_schedule(Schedule(name="s", kind="it", every_seconds=7))
