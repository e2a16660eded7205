"""Queries on the used parts of limits, and on the number of trajectories that wait for a trainer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, func, insert, select, update

from proxy.contract.states import TrainingState
from proxy.database.prepared import Prepared
from proxy.database.tables import LimitLevelRow, RunRow, SessionRow, TokenBudgetRow
from proxy.limits.bucket import Level
from proxy.limits.budget import Period, Spent
from proxy.limits.share import Kind, Levels, Rates, Trade, trade


class LimitRepository:
    """Queries of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def trade(
        self, subject_id: str, rates: Rates, *, calls: int, tokens: int, now: float
    ) -> tuple[Trade, tuple[Period, ...]]:
        """Pay tokens and take calls (see `share.trade`), while the rows are locked.

        Return the trade, and the periods whose budget it found exhausted, each once.
        """
        subject = {"subject": subject_id}
        levels = {
            kind: Level(due_at=due, moved_at=moved, per_minute=rate)
            for kind, due, moved, rate in _LOCKED.run(self._connection, subject)
        }
        spent = self._locked_budgets(subject_id) if rates.budgets else {}
        before = Levels(calls=levels.get(Kind.CALLS, Level()), tokens=levels.get(Kind.TOKENS, Level()), spent=spent)
        traded = trade(before, rates, calls=calls, tokens=tokens, now=now)
        for kind, old, new in (
            (Kind.CALLS, before.calls, traded.levels.calls),
            (Kind.TOKENS, before.tokens, traded.levels.tokens),
        ):
            if new != old:
                values = {**subject, "of": kind.value, **msgspec.structs.asdict(new)}
                (_MOVE if kind in levels else _INSERT).run(self._connection, values)
        for period, budget in traded.levels.spent.items():
            if budget != spent.get(period):
                values = {**subject, "of": period.value, **msgspec.structs.asdict(budget)}
                (_SPEND if period in spent else _INSERT_BUDGET).run(self._connection, values)
        return traded, traded.levels.exhausted_since(before)

    def budgets(self, subject_ids: Collection[str]) -> dict[str, dict[Period, Spent]]:
        """Return what was used of budgets, by subject and period, at the latest use."""
        found: dict[str, dict[Period, Spent]] = {}
        statement = select(TokenBudgetRow.subject_id, *_SPENT_COLUMNS)
        rows = self._connection.execute(statement.where(TokenBudgetRow.subject_id.in_(subject_ids)))
        for subject_id, *values in rows:
            period, spent = _spent(values)
            found.setdefault(subject_id, {})[period] = spent
        return found

    def knows_run(self, run_id: str) -> bool:
        return self._connection.execute(select(RunRow.id).where(RunRow.id == run_id)).first() is not None

    def has_more_ready(self, run_id: str, than: int) -> bool:
        """Return whether more than `than` trajectories of the run are ready for its trainer."""
        # The limit bounds the cost: a run that nobody trains may have millions.
        ready = select(SessionRow.id).where(
            SessionRow.run_id == run_id, SessionRow.training == TrainingState.READY.value
        )
        counted = select(func.count()).select_from(ready.limit(than + 1).subquery())
        return self._connection.execute(counted).scalar_one() > than

    def _locked_budgets(self, subject_id: str) -> dict[Period, Spent]:
        return dict(_spent(row) for row in _LOCKED_BUDGETS.run(self._connection, {"subject": subject_id}))


def _spent(values: Any) -> tuple[Period, Spent]:
    period, starts_at, tokens, exhausted_at = values
    return Period(period), Spent(starts_at=starts_at, tokens=tokens, exhausted_at=exhausted_at)


_LOCKED = Prepared(
    select(LimitLevelRow.kind, LimitLevelRow.due_at, LimitLevelRow.moved_at, LimitLevelRow.per_minute)
    .where(LimitLevelRow.subject_id == bindparam("subject"))
    .order_by(LimitLevelRow.kind)
    .with_for_update()
)

_LEVEL: dict[str, Any] = {name: bindparam(name) for name in Level.__struct_fields__}

_MOVE = Prepared(
    update(LimitLevelRow)
    .where(LimitLevelRow.subject_id == bindparam("subject"), LimitLevelRow.kind == bindparam("of"))
    .values(_LEVEL)
)

# If two proxies insert at once, the primary key fails one of them, and its transaction is run again.
_INSERT = Prepared(
    insert(LimitLevelRow).values({"subject_id": bindparam("subject"), "kind": bindparam("of"), **_LEVEL})
)

_SPENT_COLUMNS = (
    TokenBudgetRow.period,
    TokenBudgetRow.starts_at,
    TokenBudgetRow.tokens,
    TokenBudgetRow.exhausted_at,
)

_LOCKED_BUDGETS = Prepared(
    select(*_SPENT_COLUMNS)
    .where(TokenBudgetRow.subject_id == bindparam("subject"))
    .order_by(TokenBudgetRow.period)
    .with_for_update()
)

_BUDGET: dict[str, Any] = {name: bindparam(name) for name in Spent.__struct_fields__}

_SPEND = Prepared(
    update(TokenBudgetRow)
    .where(TokenBudgetRow.subject_id == bindparam("subject"), TokenBudgetRow.period == bindparam("of"))
    .values(_BUDGET)
)

_INSERT_BUDGET = Prepared(
    insert(TokenBudgetRow).values({"subject_id": bindparam("subject"), "period": bindparam("of"), **_BUDGET})
)
