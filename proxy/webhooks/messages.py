"""The messages that webhooks send, and which events a webhook subscribes to. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from proxy.lifecycle.outbox import MAX_PAYLOAD_BYTES

ALL = "*"
KIND = "webhook"
"""The kind of the jobs that deliver."""
TEST = "webhook.test"

KNOWN_EVENTS = (
    "budget.exhausted",
    "claim.committed",
    "claim.expired",
    "claim.released",
    "engine.added",
    "engine.drained",
    "engine.draining",
    "engine.lost",
    "engine.ready",
    "engine.removed",
    "engine.resumed",
    "engine.wrong_weights",
    "job.cancelled",
    "job.dead",
    "job.retried",
    "project.archived",
    "project.configured",
    "project.created",
    "project.deleted",
    "project.unarchived",
    "run.archived",
    "run.configured",
    "run.created",
    "run.deleted",
    "run.moved",
    "run.paused",
    "run.resumed",
    "run.unarchived",
    "session.expired",
    "sessions.erased",
    "sessions.excluded",
    "sessions.imported",
    "sessions.stale",
    "version.canary",
    "version.committed",
    "version.held",
    "version.load_failed",
    "version.pinned",
    "version.promoted",
    "version.rejected",
    "version.released",
    "version.rolled_back",
    "version.served",
    "version.shadow",
    "version.unpinned",
    "webhook.disabled",
    "weights.removed",
)
"""The kinds of events of the log, in the order of the alphabet."""

_NAME = re.compile(r"[a-z][a-z_]*(\.[a-z][a-z_]*)?")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON body of a delivery, in the shape of Standard Webhooks. `run` is the run's name."""

    type: str
    timestamp: str
    run: str | None
    run_id: str | None
    data: dict[str, Any] | None


def is_event_name(name: str) -> bool:
    """Return whether the text can name an event, the domain of several, or all of them (`*`)."""
    return name == ALL or (len(name) <= 48 and _NAME.fullmatch(name) is not None)


def is_known(name: str) -> bool:
    """Return whether events of this name, or of this domain, are in the list."""
    return name == ALL or any(kind == name or kind.startswith(f"{name}.") for kind in KNOWN_EVENTS)


def subscribes(events: Sequence[str], kind: str, data: dict[str, Any]) -> bool:
    """Return whether a webhook for `events` sends an event of this kind.

    No webhook sends events of deliveries: a delivery that fails for good would cause the next one.
    """
    if kind.startswith("job.") and data.get("kind") == KIND:
        return False
    return any(name in (ALL, kind, kind.partition(".")[0]) for name in events)


def message_id(webhook_id: str, part: str) -> str:
    """Return the id of a message, the same in every delivery of it. `part` names the message within the webhook."""
    return f"msg_{webhook_id.partition('_')[2]}_{part}"


def payload_of(webhook_id: str, event: str, message: Message) -> dict[str, Any]:
    """Return the payload of the job that delivers a message.

    It has the body itself, so that each attempt sends the same bytes, also after the event was deleted with its run.
    """
    payload = {"webhook": webhook_id, "event": event, "type": message.type, "body": _encoded(message)}
    if len(msgspec.json.encode(payload)) > MAX_PAYLOAD_BYTES:
        payload["body"] = _encoded(msgspec.structs.replace(message, data=None))
    return payload


def iso_time(at: float) -> str:
    """Return a time in the form of ISO 8601, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _encoded(message: Message) -> str:
    return msgspec.json.encode(message).decode()
