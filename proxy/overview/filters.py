"""Filters of a list of sessions, and the cursor of its next page."""

from __future__ import annotations

import msgspec

from proxy.contract.states import SessionState
from proxy.errors import InvalidRequest

MAX_PAGE = 200


class SessionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that listed sessions meet; None means any.

    `group` is a group's id or name. `name` is the client's own name of a session: all attempts of it match. Reward
    bounds are inclusive.
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
        """Whether a page goes through many sessions, as no index leads to those that match.

        Indexes find the sessions of a group, those of a name, and open ones.
        """
        if self.group is not None or self.name is not None or self.state == SessionState.OPEN:
            return False
        return any(value is not None for value in msgspec.structs.astuple(self))


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The last row of a page; the next page begins below it. On the wire, `<created_at as hex float>~<id>`."""

    at: float
    key: str

    def encode(self) -> str:
        return f"{self.at.hex().replace('+', '')}~{self.key}"  # a plus in an address would be a space

    @classmethod
    def decode(cls, text: str) -> Cursor:
        """Raise InvalidRequest for a text that is not the cursor of a page."""
        at, separator, key = text.partition("~")
        try:
            return cls(at=float.fromhex(at), key=key if separator and key else _fail())
        except (ValueError, OverflowError) as error:
            raise InvalidRequest("invalid cursor: take `next_cursor` of the previous page", param="cursor") from error


def page_size(limit: int) -> int:
    return max(1, min(limit, MAX_PAGE))


def _fail() -> str:
    raise ValueError
