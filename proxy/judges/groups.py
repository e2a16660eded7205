"""When a group of sessions is compared, and which of them are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from proxy.contract.states import SessionState
from proxy.judges.subjects import NotYet, Skipped
from proxy.lifecycle.judging import GIVEN_UP

# A prompt holds so many conversations at most.
MOST_MEMBERS = 32
# A group whose members are still running is looked at this often.
_PAUSE_SECONDS = 3600.0


class Member(NamedTuple):
    """A session of a group, with the size of the group; None if unknown."""

    id: str
    size: int | None
    state: str
    outcome: str | None
    turn_count: int
    erased_at: float | None
    ended_at: float | None


class Standing(NamedTuple):
    """The sessions to compare, in the order in which they ended."""

    session_ids: tuple[str, ...]


def standing_of(members: Sequence[Member], *, timeout: float, now: float) -> Standing | Skipped | NotYet:
    """Return the members to compare, once the group is complete or `timeout` seconds have passed since the first end.

    A group is complete when it has its expected size and nobody in it is open. One of unknown size is compared after
    the timeout.
    """
    ended = [member for member in members if member.state == SessionState.ENDED.value]
    first = min((member.ended_at for member in ended if member.ended_at is not None), default=now)
    size = members[0].size
    is_complete = size is not None and len(members) >= size and len(ended) == len(members)
    wait = first + timeout - now
    if not is_complete and wait > 0:
        return NotYet("the group is not complete", min(wait, _PAUSE_SECONDS))
    judged = sorted(
        (member for member in ended if _may_be_judged(member)), key=lambda one: (one.ended_at or 0, one.id)
    )
    if len(judged) < 2:
        return Skipped("fewer than two sessions of the group can be judged")
    if len(judged) > MOST_MEMBERS:
        return Skipped(f"the group has {len(judged)} sessions; a judge compares {MOST_MEMBERS} at most")
    return Standing(tuple(member.id for member in judged))


def _may_be_judged(member: Member) -> bool:
    return bool(member.turn_count) and member.erased_at is None and (member.outcome or "") not in GIVEN_UP
