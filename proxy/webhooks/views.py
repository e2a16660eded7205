"""Webhooks and deliveries as the API shows them. Times are seconds since the epoch."""

from __future__ import annotations

import msgspec

from proxy.contract.states import JobState
from proxy.database.rows import AnyRow


class WebhookView(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook without its secret. It is for one run, for the runs of a project, or, with neither id, for the whole
    installation."""

    id: str
    url: str
    events: tuple[str, ...]
    label: str | None
    run_id: str | None
    project_id: str | None
    created_at: float
    enabled: bool
    disabled_at: float | None
    disabled_because: str | None
    last_success_at: float | None
    failing_since: float | None
    """The first failed attempt since the last success."""
    last_error: str | None
    previous_secret_until: float | None
    """Until when requests are signed with the replaced secret too."""


class NewSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook whose secret was made just now. `secret` cannot be read again."""

    webhook: WebhookView
    secret: str


class DeliveryView(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery of one message. `event` is the id that the receiver gets in the header `webhook-id`."""

    id: str
    event: str
    type: str
    run_id: str | None
    state: JobState
    attempts: int
    status: int | None
    """The HTTP status with which the receiver confirmed the message."""
    seconds: float | None
    error: str | None
    """Why the last attempt failed."""
    body: str
    due_at: float
    created_at: float
    finished_at: float | None


def webhook_view(row: AnyRow) -> WebhookView:
    """Return the webhook of a row."""
    return WebhookView(
        id=row.id,
        url=row.url,
        events=tuple(row.events),
        label=row.label,
        run_id=row.run_id,
        project_id=row.project_id,
        created_at=row.created_at,
        enabled=row.disabled_at is None,
        disabled_at=row.disabled_at,
        disabled_because=row.disabled_because,
        last_success_at=row.last_success_at,
        failing_since=row.failing_since,
        last_error=row.last_error,
        previous_secret_until=row.previous_until,
    )


def delivery_view(row: AnyRow) -> DeliveryView:
    """Return the delivery of a job's row."""
    result = row.result or {}
    return DeliveryView(
        id=row.id,
        event=row.payload["event"],
        type=row.payload["type"],
        run_id=row.run_id or None,
        state=JobState(row.state),
        attempts=row.attempts,
        status=result.get("status"),
        seconds=result.get("seconds"),
        error=row.error,
        body=row.payload["body"],
        due_at=row.due_at,
        created_at=row.created_at,
        finished_at=row.finished_at,
    )
