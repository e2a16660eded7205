from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.claims.selection import (
    Bounds,
    Candidate,
    GroupStanding,
    Selection,
    is_claimable,
    select_units,
)

BOUNDS = Bounds(oldest_version=3, group_timeout=60.0, now=1000.0)


def candidate(name: str, *, group: str | None = None, version: int | None = 5, ready_at: float = 0.0) -> Candidate:
    return Candidate(id=name, group_id=group, task=None, ready_at=ready_at, oldest_version=version, turn_count=1)


def standing(
    *ready: Candidate, size: int | None = 4, members: int = 4, pending: int = 0, first_ended_at: float | None = 990.0
) -> GroupStanding:
    return GroupStanding(size=size, members=members, pending=pending, first_ended_at=first_ended_at, ready=ready)


def selected(page: list[Candidate], groups: dict[str, GroupStanding], *, want: int = 100) -> Selection:
    selection = Selection()
    select_units(page, groups, BOUNDS, want=want, seen=set(), selection=selection)
    return selection


def names(selection: Selection) -> list[list[str]]:
    return [[member.id for member in unit] for unit in selection.units]


def test_a_complete_group_is_claimable_at_once() -> None:
    assert is_claimable(standing(), 4, BOUNDS)
    assert is_claimable(standing(), 1, BOUNDS)


def test_a_group_waits_for_pending_and_for_missing_members() -> None:
    assert not is_claimable(standing(pending=1), 3, BOUNDS)
    assert not is_claimable(standing(members=3), 3, BOUNDS)
    assert not is_claimable(standing(size=None), 3, BOUNDS)


def test_after_the_time_out_two_are_enough() -> None:
    assert is_claimable(standing(pending=1, first_ended_at=940.0), 2, BOUNDS)
    assert not is_claimable(standing(pending=1, first_ended_at=940.1), 2, BOUNDS)
    assert is_claimable(standing(size=None, members=9, first_ended_at=940.0), 2, BOUNDS)


def test_after_the_time_out_one_is_enough_if_no_other_can_come() -> None:
    assert not is_claimable(standing(pending=1, first_ended_at=900.0), 1, BOUNDS)
    assert is_claimable(standing(members=2, first_ended_at=900.0), 1, BOUNDS)


def test_without_fresh_sessions_there_is_nothing_to_claim() -> None:
    assert not is_claimable(standing(first_ended_at=0.0), 0, BOUNDS)


def test_units_come_in_the_order_of_their_first_member() -> None:
    a1, a2 = candidate("a1", group="a"), candidate("a2", group="a")
    page = [a1, candidate("single"), candidate("b1", group="b"), a2]
    groups = {"a": standing(a1, a2, size=2, members=2), "b": standing(page[2], pending=3)}
    assert names(selected(page, groups)) == [["a1", "a2"], ["single"]]


def test_stale_members_stay_behind() -> None:
    old, young = candidate("old", group="a", version=2), candidate("young", group="a", version=3)
    selection = selected([old, young, candidate("alone", version=0)], {"a": standing(old, young)})
    assert names(selection) == [["young"]]
    assert [member.id for member in selection.stale] == ["old", "alone"]


def test_stale_members_do_not_make_up_a_group_that_timed_out() -> None:
    old, young = candidate("old", group="a", version=2), candidate("young", group="a", version=3)
    selection = selected([old, young], {"a": standing(old, young, pending=1, first_ended_at=0.0)})
    assert names(selection) == []
    assert [member.id for member in selection.stale] == ["old"]


def test_a_session_without_tokens_is_not_stale() -> None:
    assert names(selected([candidate("empty", version=None)], {})) == [["empty"]]


def test_at_most_the_wanted_number_is_taken_from_a_group_of_unknown_size() -> None:
    members = [candidate(str(number), group="a") for number in range(10)]
    groups = {"a": standing(*members, size=None, members=10, first_ended_at=0.0)}
    assert selected(members, groups, want=4).count == 4


@given(
    st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 6)), max_size=30),
    st.integers(1, 12),
)
def test_whole_groups_each_once_and_no_more_than_needed(members: list[tuple[str | None, int]], want: int) -> None:
    page = [candidate(str(number), group=group, version=version) for number, (group, version) in enumerate(members)]
    groups = {
        name: standing(*(member for member in page if member.group_id == name), size=1, members=1)
        for name in ("a", "b", "c")
    }
    selection = selected(page, groups, want=want)
    taken = [member.id for member in selection.candidates]
    assert len(taken) == len(set(taken))
    assert not set(taken) & {member.id for member in selection.stale}
    for unit in selection.units:
        assert len({member.group_id for member in unit}) == 1
        if unit[0].group_id is not None:
            fresh = [member for member in groups[unit[0].group_id].ready if (member.oldest_version or 0) >= 3]
            assert list(unit) == fresh
    if selection.units:
        assert selection.count - len(selection.units[-1]) < want
