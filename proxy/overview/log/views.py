"""The views of the event log."""

from __future__ import annotations

from typing import Any

import msgspec


class LoggedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the event log. `run` is the name of its run; None for an event of the whole installation."""

    id: int
    kind: str
    run_id: str | None
    run: str | None
    data: dict[str, Any]
    created_at: float


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the event log, newest first. A page may have fewer events than asked for, or none, and still have a
    `next_cursor`: the filter then matched few of the events that were searched."""

    events: tuple[LoggedEvent, ...]
    next_cursor: str | None


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that listed events meet; None means any.

    `kind` is a whole kind, such as `run.created`, or the domain of several, such as `run`. `run_ids` are the runs
    whose events are listed: those of the whole installation are then left out.
    """

    kind: str | None = None
    run_ids: tuple[str, ...] | None = None
