"""Filters of a list of sessions, and the cursor that leads to the next page of a list."""

from __future__ import annotations

import msgspec

from proxy.contract.states import SessionState
from proxy.errors import InvalidRequest

MAX_PAGE = 200


class SessionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that listed sessions meet; None means any.

    `group` is a group's id or name. `name` is the client's own name of a session and matches all of its attempts.
    Reward bounds are inclusive.
    """

    state: str | None = None
    training: str | None = None
    group: str | None = None
    name: str | None = None
    attributed_by: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None

    @property
    def is_searched(self) -> bool:
        """Return whether no index finds the matching sessions, so that a page searches many sessions for them.

        There are indexes for the sessions of a group, those of a name, and open ones.
        """
        if self.group is not None or self.name is not None or self.state == SessionState.OPEN:
            return False
        return any(value is not None for value in msgspec.structs.astuple(self))


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The last row of a page; the next page begins after it. On the wire, `<created_at as hex float>~<id>`."""

    at: float
    key: str

    def encode(self) -> str:
        # Hexadecimal is exact. Without the plus sign, which a query decodes to a space.
        return f"{self.at.hex().replace('+', '')}~{self.key}"

    @classmethod
    def decode(cls, text: str) -> Cursor:
        """Parse a cursor. Raise InvalidRequest for any other text."""
        at, separator, key = text.partition("~")
        try:
            return cls(at=float.fromhex(at), key=key if separator and key else _fail())
        except (ValueError, OverflowError) as error:
            raise InvalidRequest("invalid cursor: take `next_cursor` of the previous page", param="cursor") from error


def page_size(limit: int) -> int:
    return max(1, min(limit, MAX_PAGE))


def _fail() -> str:
    raise ValueError
