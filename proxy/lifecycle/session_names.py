"""Look-up of sessions by the names that clients use: our id, or their own name within a run."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, bindparam, select

from proxy.contract.identifiers import is_session_id
from proxy.database.prepared import Prepared
from proxy.database.tables import SessionRow


def session_called(connection: Connection, name: str, run_id: str | None, by_id: Prepared) -> tuple[Any, ...] | None:
    """Return the row of the session with this id, else of the newest attempt with this name; None if there is none.

    `by_id` selects the row by the parameter `of`; its second column must be the run. Without a run, `name` can only
    be an id.
    """
    # Up to three index look-ups: in one statement PostgreSQL may compare the name with every session. The newest
    # attempt has the highest number, as the clock may have been set back between attempts.
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
    .order_by(SessionRow.attempt.desc(), SessionRow.created_at.desc(), SessionRow.id.desc())
    .limit(1)
)
