"""Which ready sessions a claim takes: whole groups, first ready first, nothing too old. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec


class Candidate(NamedTuple):
    """A session that is ready."""

    id: str
    group_id: str | None
    task: str | None
    ready_at: float
    oldest_version: int | None
    turn_count: int


class GroupStanding(NamedTuple):
    """`members` are all sessions of the group, `pending` those that may yet become ready; `ready` may be claimed.

    `size` is how many members are expected, None where nobody said. `first_ended_at`: when its first member ended.
    """

    size: int | None
    members: int
    pending: int
    first_ended_at: float | None
    ready: tuple[Candidate, ...]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """`oldest_version`: trajectories with an older token are stale. `group_timeout` in seconds."""

    oldest_version: int
    group_timeout: float
    now: float


class Selection(msgspec.Struct, kw_only=True):
    """`units` are what goes together: the ready members of a group, or one session without a group."""

    units: list[tuple[Candidate, ...]] = msgspec.field(default_factory=list)
    stale: list[Candidate] = msgspec.field(default_factory=list)
    count: int = 0
    """Of the sessions in `units`."""

    @property
    def candidates(self) -> list[Candidate]:
        return [candidate for unit in self.units for candidate in unit]


def select_units(
    page: Sequence[Candidate],
    groups: Mapping[str, GroupStanding],
    bounds: Bounds,
    *,
    want: int,
    seen: set[str],
    selection: Selection,
) -> None:
    """Adds the claimable of `page`, in its order, to `selection` until that holds `want` or more.

    `groups` has the standing of every group named in `page`; `seen` those already decided on. A group of unknown
    size may be any number of sessions and gives `want` of them at most.
    """
    for candidate in page:
        if selection.count >= want:
            return
        if candidate.group_id is None:
            _add((candidate,), bounds, selection)
        elif candidate.group_id not in seen:
            seen.add(candidate.group_id)
            standing = groups[candidate.group_id]
            fresh = sum(not is_stale(member, bounds) for member in standing.ready)
            if is_claimable(standing, fresh, bounds):
                _add(standing.ready if standing.size is not None else standing.ready[:want], bounds, selection)
            else:
                selection.stale.extend(member for member in standing.ready if is_stale(member, bounds))


def is_stale(candidate: Candidate, bounds: Bounds) -> bool:
    return candidate.oldest_version is not None and candidate.oldest_version < bounds.oldest_version


def is_claimable(standing: GroupStanding, fresh: int, bounds: Bounds) -> bool:
    """Whether the group's `fresh` members go out now.

    It is complete when as many members as expected are there and none is pending. Else it waits for
    `group_timeout` after its first end, and then goes with two or more; with one only if no other is under way.
    """
    if fresh == 0:
        return False
    if standing.size is not None and standing.members >= standing.size and standing.pending == 0:
        return True
    if standing.first_ended_at is None or bounds.now < standing.first_ended_at + bounds.group_timeout:
        return False
    return fresh >= 2 or standing.pending == 0


def _add(members: Iterable[Candidate], bounds: Bounds, selection: Selection) -> None:
    fresh: list[Candidate] = []
    for member in members:
        (selection.stale if is_stale(member, bounds) else fresh).append(member)
    if fresh:
        selection.units.append(tuple(fresh))
        selection.count += len(fresh)
