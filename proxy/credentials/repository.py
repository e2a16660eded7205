"""Rows of API keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from proxy.database.tables import ApiKeyRow


class KeyRepository:
    """Reads and writes of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def by_digest(self, digest: bytes) -> Row[*tuple[Any, ...]] | None:
        return self._connection.execute(_KEYS.where(ApiKeyRow.digest == digest)).one_or_none()

    def insert(self, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            self._connection.execute(insert(ApiKeyRow), list(rows))

    def of_run(self, run_id: str, kinds: Sequence[str]) -> list[Row[*tuple[Any, ...]]]:
        statement = _KEYS.where(ApiKeyRow.run_id == run_id, ApiKeyRow.kind.in_(kinds))
        return list(self._connection.execute(statement.order_by(ApiKeyRow.created_at, ApiKeyRow.id)).all())

    def revoke(self, key_id: str, now: float) -> bool:
        """Whether there is such a key. The time of the first revocation stays."""
        revoked = self._connection.execute(
            update(ApiKeyRow).where(ApiKeyRow.id == key_id, ApiKeyRow.revoked_at.is_(None)).values(revoked_at=now)
        )
        if revoked.rowcount:
            return True
        found = self._connection.execute(select(ApiKeyRow.id).where(ApiKeyRow.id == key_id))
        return found.one_or_none() is not None


_KEYS = select(
    ApiKeyRow.id,
    ApiKeyRow.kind,
    ApiKeyRow.run_id,
    ApiKeyRow.session_id,
    ApiKeyRow.label,
    ApiKeyRow.created_at,
    ApiKeyRow.revoked_at,
)
