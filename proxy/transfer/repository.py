"""Rows of exports in the background."""

from __future__ import annotations

from sqlalchemy import Connection, select

from proxy.database.rows import AnyRow
from proxy.database.tables import JobRow


class ExportRepository:
    """Reads within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def find(self, kind: str, key: str) -> AnyRow | None:
        """Return `id`, `state`, `error` and `result` of a job by its key."""
        columns = (JobRow.id, JobRow.state, JobRow.error, JobRow.result)
        return self._connection.execute(select(*columns).where(JobRow.kind == kind, JobRow.key == key)).one_or_none()
