"""The share of time in which an engine was busy, as one process of the proxy measures it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.activity import EngineActivity

SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12)


@given(spans=SPANS)
def test_busy_seconds_are_those_that_any_generation_covers(spans: list[tuple[int, int]]) -> None:
    now = [0.0]
    activity = EngineActivity(lambda: now[0])
    moments = [(begin, 0) for begin, _ in spans] + [(begin + length, 1) for begin, length in spans]
    for moment, ends in sorted(moments):
        now[0] = float(moment)
        (activity.end if ends else activity.begin)()
    covered = {second for begin, length in spans for second in range(begin, begin + length)}
    now[0] = 100.0
    reading = activity.read()
    assert (reading.seconds, reading.busy_seconds) == (100.0, float(len(covered)))
    assert activity.generations == 0


def test_readings_of_two_processes_can_be_distinguished() -> None:
    assert EngineActivity().read().process != EngineActivity().read().process
