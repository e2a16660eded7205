"""Which of several engines takes a call."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.serving.routing import choose_engine, served_version

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True)
IDLE = 0


@given(st.text(), NAMES, st.data())
def test_equally_busy_engines_keep_their_sessions(session: str, names: list[str], data: st.DataObject) -> None:
    load = data.draw(st.integers(0, 10**6))
    own = names[choose_engine(session, [load] * len(names), names)]
    order = data.draw(st.permutations(names))
    assert order[choose_engine(session, [load] * len(order), order)] == own, "the order of engines does not matter"


@given(st.text(), NAMES.filter(lambda names: len(names) > 1), st.data())
def test_an_engine_that_goes_moves_only_its_own_sessions(session: str, names: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    before = names[choose_engine(session, [IDLE] * len(names), names)]
    after = left[choose_engine(session, [IDLE] * len(left), left)]
    assert before in (gone, after)


@given(st.one_of(st.none(), st.text()), NAMES, st.data())
def test_no_call_goes_to_an_engine_that_is_far_busier_than_the_others(
    session: str | None, names: list[str], data: st.DataObject
) -> None:
    loads = data.draw(st.lists(st.integers(0, 10**6), min_size=len(names), max_size=len(names)))
    chosen = loads[choose_engine(session, loads, names)]
    mean = sum(loads) / len(loads)
    assert chosen == min(loads) or chosen <= max(1.25 * mean, mean + 4096)


@given(NAMES, st.data())
def test_a_call_without_a_session_goes_where_least_is_to_do(names: list[str], data: st.DataObject) -> None:
    loads = data.draw(st.lists(st.integers(0, 10**6), min_size=len(names), max_size=len(names)))
    assert loads[choose_engine(None, loads, names)] == min(loads)


def test_sessions_are_spread_over_the_engines() -> None:
    names = ["http://a:1", "http://b:1", "http://c:1"]
    chosen = Counter(choose_engine(f"ses_{number}", [IDLE] * 3, names) for number in range(3000))
    assert all(850 < count < 1150 for count in chosen.values()), chosen


@given(st.lists(st.integers(0, 9)), st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 9))))
def test_new_calls_get_the_version_that_was_wanted_last_or_the_newest_there_is(
    held: list[int], wanted: list[tuple[float, int]]
) -> None:
    served = served_version(held, wanted)
    latest = max((at for at, _ in wanted), default=None)
    last = {version for at, version in wanted if at == latest}
    if last <= set(held):  # several if engines looked at the same time
        assert served in last or not wanted
    if not last & set(held):
        assert served == max(held, default=None)
