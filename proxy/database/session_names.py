"""Sessions by what clients call them: our id, or a name of their own within a run."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, bindparam, select

from proxy.contract.identifiers import is_session_id
from proxy.database.prepared import Prepared
from proxy.database.tables import SessionRow


def session_called(connection: Connection, name: str, run_id: str | None, by_id: Prepared) -> tuple[Any, ...] | None:
    """The row of the session that is meant, as `by_id` gives it (of a session `of`; its second column is the run).

    Where a session of the run has this id, that one; else the newest of the run that had this name. Without a run
    only ids are known. Up to three looks into indexes, whatever the number of sessions: as one statement, PostgreSQL
    may compare the name with every session that there is.
    """
    if run_id is None or is_session_id(name):
        rows = by_id.run(connection, {"of": name})
        if rows and run_id in (None, rows[0][1]):
            return rows[0]
    if run_id is None:
        return None
    newest = _NEWEST.run(connection, {"name": name, "run": run_id})
    return by_id.run(connection, {"of": newest[0][0]})[0] if newest else None


_NEWEST = Prepared(
    select(SessionRow.id)
    .where(SessionRow.run_id == bindparam("run"), SessionRow.external_id == bindparam("name"))
    .order_by(SessionRow.created_at.desc(), SessionRow.id.desc())
    .limit(1)
)
