"""Queries on the rows of rate limits, and on the number of trajectories that wait for a trainer."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, func, insert, select, update

from proxy.contract.states import TrainingState
from proxy.database.prepared import Prepared
from proxy.database.tables import RateLimitRow, SessionRow
from proxy.limits.bucket import Level
from proxy.limits.share import Kind, Levels, Rates, Trade, trade


class LimitRepository:
    """Queries of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def trade(self, run_id: str, rates: Rates, *, calls: int, tokens: int, now: float) -> Trade:
        """Pay tokens and take calls (see `share.trade`), while the rows are locked."""
        rows = _LOCKED.run(self._connection, {"run": run_id})
        found = {kind: Level(due_at=due, moved_at=moved, per_minute=rate) for kind, due, moved, rate in rows}
        before = Levels(calls=found.get(Kind.CALLS, Level()), tokens=found.get(Kind.TOKENS, Level()))
        traded = trade(before, rates, calls=calls, tokens=tokens, now=now)
        for kind, old, new in (
            (Kind.CALLS, before.calls, traded.levels.calls),
            (Kind.TOKENS, before.tokens, traded.levels.tokens),
        ):
            if new != old:
                values = {"run": run_id, "of": kind.value, **msgspec.structs.asdict(new)}
                (_MOVE if kind in found else _INSERT).run(self._connection, values)
        return traded

    def has_more_ready(self, run_id: str, than: int) -> bool:
        """Return whether more than `than` trajectories of the run are ready for its trainer."""
        # The limit bounds the cost: a run that nobody trains may have millions.
        ready = select(SessionRow.id).where(
            SessionRow.run_id == run_id, SessionRow.training == TrainingState.READY.value
        )
        counted = select(func.count()).select_from(ready.limit(than + 1).subquery())
        return self._connection.execute(counted).scalar_one() > than


_LOCKED = Prepared(
    select(RateLimitRow.kind, RateLimitRow.due_at, RateLimitRow.moved_at, RateLimitRow.per_minute)
    .where(RateLimitRow.run_id == bindparam("run"))
    .order_by(RateLimitRow.kind)
    .with_for_update()
)

_LEVEL: dict[str, Any] = {name: bindparam(name) for name in Level.__struct_fields__}

_MOVE = Prepared(
    update(RateLimitRow)
    .where(RateLimitRow.run_id == bindparam("run"), RateLimitRow.kind == bindparam("of"))
    .values(_LEVEL)
)

# If two proxies insert at once, the primary key fails one of them, and its transaction is run again.
_INSERT = Prepared(insert(RateLimitRow).values({"run_id": bindparam("run"), "kind": bindparam("of"), **_LEVEL}))
