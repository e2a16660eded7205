"""Selection of ready sessions for a claim: whole groups, first ready first, without stale ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec


class Candidate(NamedTuple):
    """A ready session."""

    id: str
    group_id: str | None
    task: str | None
    ready_at: float
    oldest_version: int | None
    turn_count: int
    first_message: bytes | None = None


class GroupStanding(NamedTuple):
    """The state of a group.

    `size` is the expected number of members, None if unknown. `members` counts all of its sessions, `pending` those
    that may still become ready; `ready` are claimable. `first_ended_at` is the time at which the first member ended.
    """

    size: int | None
    members: int
    pending: int
    first_ended_at: float | None
    ready: tuple[Candidate, ...]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a selection. A trajectory with a token older than `oldest_version` is stale. `group_timeout` and
    `now` are in seconds."""

    oldest_version: int
    group_timeout: float
    now: float


class Selection(msgspec.Struct, kw_only=True):
    """The result of a selection. A unit is claimed as a whole: the ready members of a group, or one session without a
    group."""

    units: list[tuple[Candidate, ...]] = msgspec.field(default_factory=list)
    stale: list[Candidate] = msgspec.field(default_factory=list)
    count: int = 0
    """The number of sessions in `units`."""

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
    """Add the claimable sessions of `page`, in order, to `selection` until it has `want` or more.

    `groups` has the standing of every group in `page`; `seen` collects the groups already decided on. A group of
    unknown size may be arbitrarily large, so at most `want` of its sessions are taken.
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
    """Return whether the `fresh` members of the group, those not stale, are claimable now.

    A complete group is: it has the expected number of members and none is pending. An incomplete one becomes
    claimable `group_timeout` seconds after its first member ended, if two or more members are fresh, or one and none
    is pending.
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
