"""Rows of webhooks, and their deliveries among the jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, null, or_, select, update

from proxy.database.rows import AnyRow
from proxy.database.tables import EventRow, JobRow, RunRow, WebhookRow
from proxy.webhooks.messages import KIND

# Most events that one look at the log considers for a webhook; the next look goes on.
EVENTS_AT_ONCE = 200
# Most characters of an error that the row stores.
_ERROR_CHARACTERS = 500


class WebhookRepository:
    """Reads and writes within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def insert(self, values: dict[str, Any]) -> None:
        """Insert a webhook that follows the log from the newest event on."""
        newest = select(func.coalesce(func.max(EventRow.id), 0)).scalar_subquery()
        self._connection.execute(insert(WebhookRow).values(**values, last_event_id=newest))

    def find(self, webhook_id: str, *, lock: bool = False) -> AnyRow | None:
        statement = _WEBHOOKS.where(WebhookRow.id == webhook_id)
        return self._connection.execute(statement.with_for_update() if lock else statement).one_or_none()

    def list_(self, *, run_id: str | None, project_id: str | None) -> list[AnyRow]:
        """Return webhooks, oldest first: all, those of a run, or those of a project and of its runs."""
        statement = _WEBHOOKS
        if run_id is not None:
            statement = statement.where(WebhookRow.run_id == run_id)
        if project_id is not None:
            runs = select(RunRow.id).where(RunRow.project_id == project_id)
            statement = statement.where(or_(WebhookRow.project_id == project_id, WebhookRow.run_id.in_(runs)))
        return list(self._connection.execute(statement.order_by(WebhookRow.id)).all())

    def count(self) -> int:
        return int(self._connection.execute(select(func.count()).select_from(WebhookRow)).scalar_one())

    def set(self, webhook_id: str, values: dict[str, Any]) -> None:
        self._connection.execute(update(WebhookRow).where(WebhookRow.id == webhook_id).values(values))

    def enable(self, webhook_id: str) -> None:
        """Enable a webhook. It does not send what happened while it was disabled."""
        newest = select(func.coalesce(func.max(EventRow.id), 0)).scalar_subquery()
        fresh = {"disabled_at": null(), "disabled_because": null(), "failing_since": null(), "last_error": null()}
        statement = update(WebhookRow).where(WebhookRow.id == webhook_id, WebhookRow.disabled_at.is_not(None))
        self._connection.execute(statement.values(**fresh, last_event_id=newest))

    def disable(self, webhook_id: str, *, because: str, now: float) -> bool:
        """Disable a webhook. Return False if it is disabled already or gone."""
        statement = update(WebhookRow).where(WebhookRow.id == webhook_id, WebhookRow.disabled_at.is_(None))
        return self._connection.execute(statement.values(disabled_at=now, disabled_because=because)).rowcount == 1

    def delete(self, webhook_id: str) -> None:
        """Delete a webhook and its deliveries."""
        self._connection.execute(delete(JobRow).where(*_deliveries_of(webhook_id)))
        self._connection.execute(delete(WebhookRow).where(WebhookRow.id == webhook_id))

    # The results of attempts

    def record_success(self, webhook_id: str, now: float) -> None:
        values = {"last_success_at": now, "failing_since": null(), "last_error": null()}
        self._connection.execute(update(WebhookRow).where(WebhookRow.id == webhook_id).values(**values))

    def record_failure(self, webhook_id: str, error: str, now: float) -> None:
        values = {
            "failing_since": func.coalesce(WebhookRow.failing_since, now),
            "last_error": error[:_ERROR_CHARACTERS],
        }
        self._connection.execute(update(WebhookRow).where(WebhookRow.id == webhook_id).values(**values))

    # The event log

    def behind(self) -> list[AnyRow]:
        """Return the enabled webhooks that have not considered the newest event."""
        newest = select(func.coalesce(func.max(EventRow.id), 0)).scalar_subquery()
        statement = _WEBHOOKS.where(WebhookRow.disabled_at.is_(None), WebhookRow.last_event_id < newest)
        return list(self._connection.execute(statement).all())

    def events_after(self, webhook: AnyRow) -> tuple[list[AnyRow], int]:
        """Return the next events in the webhook's scope, oldest first, and the id up to which they are complete."""
        newest = int(self._connection.execute(select(func.coalesce(func.max(EventRow.id), 0))).scalar_one())
        statement = (
            select(EventRow.__table__, RunRow.name.label("run"))
            .outerjoin(RunRow, RunRow.id == EventRow.run_id)
            .where(EventRow.id > webhook.last_event_id, EventRow.id <= newest)
        )
        if webhook.run_id is not None:
            statement = statement.where(EventRow.run_id == webhook.run_id)
        elif webhook.project_id is not None:
            statement = statement.where(RunRow.project_id == webhook.project_id)
        rows = list(self._connection.execute(statement.order_by(EventRow.id).limit(EVENTS_AT_ONCE)).all())
        return rows, newest if len(rows) < EVENTS_AT_ONCE else rows[-1].id

    def advance(self, webhook_id: str, *, before: int, to: int) -> bool:
        """Move the webhook's place in the log. Return False if another proxy moved it, or it is disabled or gone."""
        statement = update(WebhookRow).where(
            WebhookRow.id == webhook_id, WebhookRow.last_event_id == before, WebhookRow.disabled_at.is_(None)
        )
        return self._connection.execute(statement.values(last_event_id=to)).rowcount == 1

    def has_happened(self, name: str, *, among: int) -> bool:
        """Return whether an event of this kind or domain is among the newest events of the log."""
        newest = select(EventRow.kind).order_by(EventRow.id.desc()).limit(among).subquery()
        kind = newest.c.kind
        statement = select(kind).where(or_(kind == name, kind.startswith(f"{name}.", autoescape=True)))
        return self._connection.execute(statement.limit(1)).first() is not None

    # Deliveries

    def deliveries(
        self, webhook_id: str, *, states: Sequence[str] | None, below: str | None, limit: int
    ) -> list[AnyRow]:
        """Return a page of the webhook's deliveries, newest first."""
        statement = _DELIVERIES.where(*_deliveries_of(webhook_id))
        if states is not None:
            statement = statement.where(JobRow.state.in_(states))
        if below is not None:
            statement = statement.where(JobRow.id < below)
        return list(self._connection.execute(statement.order_by(JobRow.id.desc()).limit(limit)).all())

    def delivery(self, webhook_id: str, job_id: str) -> AnyRow | None:
        statement = _DELIVERIES.where(JobRow.id == job_id, *_deliveries_of(webhook_id))
        return self._connection.execute(statement).one_or_none()


def _deliveries_of(webhook_id: str) -> tuple[ColumnElement[bool], ...]:
    # A range, because the index on kind and key serves it. The character after `:` is `;`.
    return (JobRow.kind == KIND, JobRow.key >= f"{webhook_id}:", JobRow.key < f"{webhook_id};")


_WEBHOOKS = select(*WebhookRow.__table__.columns)
_DELIVERIES = select(
    JobRow.id,
    JobRow.key,
    JobRow.run_id,
    JobRow.state,
    JobRow.payload,
    JobRow.result,
    JobRow.error,
    JobRow.attempts,
    JobRow.due_at,
    JobRow.created_at,
    JobRow.started_at,
    JobRow.finished_at,
)
