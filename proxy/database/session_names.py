"""Sessions by what clients call them: our id, or a name of their own within a run."""

from __future__ import annotations

from typing import Any

from sqlalchemy import CompoundSelect, Connection, bindparam, select, union_all
from sqlalchemy.orm import aliased

from proxy.database.prepared import Prepared
from proxy.database.tables import SessionRow


def _sessions_called(name: Any, run_id: Any) -> CompoundSelect[Any]:
    """The ids of two sessions at most: the one with this id in the run, and the newest of the run that had this name.

    Where both are there, the id is meant. Two looks into indexes, whatever the number of sessions: an OR over both is
    answered by a walk through the run.
    """
    named, own = aliased(SessionRow), aliased(SessionRow)
    newest = (
        select(named.id)
        .where(named.run_id == run_id, named.external_id == name)
        .order_by(named.created_at.desc(), named.id.desc())
        .limit(1)
        .subquery()
    )
    return union_all(select(own.id).where(own.id == name, own.run_id == run_id), select(newest.c.id))


def session_called(connection: Connection, name: str, run_id: str) -> str | None:
    """The id of the session that is meant. To be looked up by itself: as a part of another statement, PostgreSQL
    compares it with every session that there is."""
    found = [row[0] for row in _CALLED.run(connection, {"name": name, "run": run_id})]
    return name if name in found else next(iter(found), None)


_CALLED = Prepared(_sessions_called(bindparam("name"), bindparam("run")))
