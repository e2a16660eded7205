"""Queries on the rows of API keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, update
from sqlalchemy.orm import aliased

from proxy.database.rows import AnyRow
from proxy.database.tables import ApiKeyRow, RunRow

KeyRow = AnyRow


class KeyRepository:
    """Queries of one transaction. A key is valid while `revoked_at` and `expires_at` are null or in the future."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def by_digest(self, digest: bytes) -> KeyRow | None:
        return self._connection.execute(_KEYS.where(ApiKeyRow.digest == digest)).one_or_none()

    def by_id(self, key_id: str) -> KeyRow | None:
        return self._connection.execute(_KEYS.where(ApiKeyRow.id == key_id)).one_or_none()

    def insert(self, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            self._connection.execute(insert(ApiKeyRow), list(rows))

    def of_run(self, run_id: str, kinds: Sequence[str]) -> list[KeyRow]:
        statement = _KEYS.where(ApiKeyRow.run_id == run_id, ApiKeyRow.kind.in_(kinds))
        return list(self._connection.execute(statement.order_by(ApiKeyRow.created_at, ApiKeyRow.id)).all())

    def page(
        self,
        *,
        kinds: Sequence[str],
        run_id: str | None,
        project_id: str | None,
        valid_at: float | None,
        below: tuple[float, str] | None,
        limit: int,
    ) -> list[KeyRow]:
        """Return a page of keys, newest first.

        With `valid_at`, leave out keys that are revoked or expired by then. With `project_id`, return the keys of the
        project and of its runs. `below` is the `created_at` and the id of the last
        row of the previous page.
        """
        statement = _KEYS.where(ApiKeyRow.kind.in_(kinds))
        if run_id is not None:
            statement = statement.where(ApiKeyRow.run_id == run_id)
        if project_id is not None:
            statement = statement.where(_in_project(project_id))
        if valid_at is not None:
            statement = statement.where(_valid(valid_at))
        if below is not None:
            at, key = below
            # Keys of one transaction have the same time, so the id decides their order.
            same_time = and_(ApiKeyRow.created_at == at, ApiKeyRow.id < key)
            statement = statement.where(or_(ApiKeyRow.created_at < at, same_time))
        statement = statement.order_by(ApiKeyRow.created_at.desc(), ApiKeyRow.id.desc()).limit(limit)
        return list(self._connection.execute(statement).all())

    def limited(self, *, project_id: str | None, valid_at: float) -> list[KeyRow]:
        """Return the valid keys that limits of keys bind, oldest first, without those of sessions."""
        statement = _KEYS.where(_LIMITER.limits.is_not(None), ApiKeyRow.kind != "session", _valid(valid_at))
        if project_id is not None:
            statement = statement.where(_in_project(project_id))
        return list(self._connection.execute(statement.order_by(ApiKeyRow.created_at, ApiKeyRow.id)).all())

    def lasting_admins(self, *, other_than: str) -> int:
        """Return 1 if there is another admin key that is neither revoked nor expires; otherwise 0."""
        statement = select(ApiKeyRow.id).where(
            ApiKeyRow.kind == "admin",
            ApiKeyRow.revoked_at.is_(None),
            ApiKeyRow.expires_at.is_(None),
            ApiKeyRow.id != other_than,
        )
        return len(self._connection.execute(statement.limit(1)).all())

    def revoke(self, key_id: str, at: float) -> None:
        """Set the time from which a key is revoked, which may be in the future, unless an earlier one is set."""
        # An earlier end stays: revoking a key in its grace period again must not extend that period.
        later = or_(ApiKeyRow.revoked_at.is_(None), ApiKeyRow.revoked_at > at)
        self._connection.execute(update(ApiKeyRow).where(ApiKeyRow.id == key_id, later).values(revoked_at=at))

    def set(self, key_id: str, **values: Any) -> None:
        self._connection.execute(update(ApiKeyRow).where(ApiKeyRow.id == key_id).values(**values))

    def revoke_labelled(self, label: str, *, kind: str, run_id: str | None, but: str, at: float) -> list[str]:
        """Revoke the keys of this label, kind and run, except the key `but`. Return the ids of the revoked ones."""
        statement = select(ApiKeyRow.id).where(
            ApiKeyRow.label == label,
            ApiKeyRow.kind == kind,
            ApiKeyRow.run_id == run_id if run_id is not None else ApiKeyRow.run_id.is_(None),
            ApiKeyRow.revoked_at.is_(None),
            ApiKeyRow.id != but,
        )
        ids = list(self._connection.execute(statement).scalars())
        for key_id in ids:
            self.revoke(key_id, at)
        return ids

    def note_used(self, used: Mapping[str, float], *, resolution: float) -> None:
        """Set `last_used_at` of keys where the stored time is older than `resolution` seconds."""
        for key_id, at in used.items():
            stale = or_(ApiKeyRow.last_used_at.is_(None), ApiKeyRow.last_used_at < at - resolution)
            self._connection.execute(update(ApiKeyRow).where(ApiKeyRow.id == key_id, stale).values(last_used_at=at))


def _valid(at: float) -> ColumnElement[bool]:
    return and_(*(or_(end.is_(None), end > at) for end in (ApiKeyRow.revoked_at, ApiKeyRow.expires_at)))


def _in_project(project_id: str) -> ColumnElement[bool]:
    runs = select(RunRow.id).where(RunRow.project_id == project_id)
    return or_(ApiKeyRow.project_id == project_id, ApiKeyRow.run_id.in_(runs))


_LIMITER = aliased(ApiKeyRow)

_KEYS = select(
    ApiKeyRow.id,
    ApiKeyRow.kind,
    ApiKeyRow.run_id,
    ApiKeyRow.session_id,
    ApiKeyRow.project_id,
    ApiKeyRow.label,
    ApiKeyRow.created_at,
    ApiKeyRow.last_used_at,
    ApiKeyRow.revoked_at,
    ApiKeyRow.expires_at,
    func.coalesce(ApiKeyRow.limited_as, ApiKeyRow.id).label("limited_as"),
    _LIMITER.label.label("limiter_name"),
    _LIMITER.limits,
).outerjoin(_LIMITER, _LIMITER.id == func.coalesce(ApiKeyRow.limited_as, ApiKeyRow.id))
