"""Rows of projects."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from proxy.contract.states import RunState
from proxy.database.rows import AnyRow
from proxy.database.tables import DEFAULT_PROJECT_ID, USED_LIMITS, ApiKeyRow, ProjectRow, RunRow, WebhookRow
from proxy.errors import Conflict


class ProjectRepository:
    """Queries that run within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def by_name(self, name: str) -> AnyRow | None:
        return self._connection.execute(_PROJECTS.where(ProjectRow.name == name)).one_or_none()

    def by_name_or_id(self, name_or_id: str, *, lock: bool = False) -> AnyRow | None:
        """Find a project. With `lock`, no other transaction changes or deletes the row until this one ends."""
        statement = _PROJECTS.where(or_(ProjectRow.name == name_or_id, ProjectRow.id == name_or_id))
        # A project's name may equal another project's id; the name wins.
        statement = statement.order_by(ProjectRow.name != name_or_id).limit(1)
        return self._connection.execute(statement.with_for_update() if lock else statement).first()

    def all_by_age(self) -> list[AnyRow]:
        return list(self._connection.execute(_PROJECTS.order_by(ProjectRow.created_at, ProjectRow.id)).all())

    def runs_by_project(self) -> dict[str, int]:
        """Count the runs of each project; projects without runs are omitted."""
        is_there = RunRow.state != RunState.DELETED.value
        counted = select(RunRow.project_id, func.count()).where(is_there).group_by(RunRow.project_id)
        return {row[0]: row[1] for row in self._connection.execute(counted)}

    def run_names(self, project_id: str, *, but_archived: bool = False) -> list[str]:
        """Return the names of the project's runs, or of those that are not archived."""
        is_there = RunRow.state != RunState.DELETED.value
        statement = select(RunRow.name).where(RunRow.project_id == project_id, is_there).order_by(RunRow.name)
        if but_archived:
            statement = statement.where(RunRow.state != RunState.ARCHIVED.value)
        return list(self._connection.execute(statement).scalars())

    def insert(self, *, project_id: str, name: str, settings: dict[str, Any], now: float) -> None:
        """Insert a project. Raise Conflict if there is one of this name."""
        values = {"id": project_id, "name": name, "settings": settings, "created_at": now}
        try:
            self._connection.execute(insert(ProjectRow).values(values))
        except IntegrityError as error:
            raise Conflict(
                f"there is a project called {name!r} already: choose another name", param="name"
            ) from error

    def set(self, project_id: str, values: dict[str, Any]) -> None:
        self._connection.execute(update(ProjectRow).where(ProjectRow.id == project_id).values(values))

    def delete(self, project_id: str) -> None:
        """Delete a project without runs, its keys and its webhooks, and the use of its limits and theirs."""
        keys = select(ApiKeyRow.id).where(ApiKeyRow.project_id == project_id)
        for used in USED_LIMITS:
            is_subject = or_(used.subject_id == project_id, used.subject_id.in_(keys))
            self._connection.execute(delete(used).where(is_subject))
        # Referring rows first: PostgreSQL enforces the foreign keys statement by statement.
        for table in (ApiKeyRow, WebhookRow):
            self._connection.execute(delete(table).where(table.project_id == project_id))
        # Rows of deleted runs stay until all that belonged to them is removed.
        deleted = update(RunRow).where(RunRow.project_id == project_id)
        self._connection.execute(deleted.values(project_id=DEFAULT_PROJECT_ID))
        self._connection.execute(delete(ProjectRow).where(ProjectRow.id == project_id))


_PROJECTS = select(ProjectRow.id, ProjectRow.name, ProjectRow.created_at, ProjectRow.archived_at, ProjectRow.settings)
