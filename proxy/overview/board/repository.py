"""The queries that read something of every run at once."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Text, cast, func, select, tuple_
from sqlalchemy.orm import aliased

from proxy.contract.states import RunState
from proxy.contract.trajectory import Purpose
from proxy.database.chunks import chunks
from proxy.database.tables import PolicyVersionRow, RunRow, SessionRow


class BoardRepository:
    """Queries that run within one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def last_rewards(self, *, count: int, searched: int, with_archived: bool) -> dict[str, list[float]]:
        """Return the rewards of the last `count` ended and rewarded training sessions of each run, oldest first.

        They are searched for among the last `searched` ended sessions of the run. Runs without rewards are omitted.
        """
        run = aliased(RunRow)
        ended = (
            select(SessionRow.ended_at, SessionRow.reward, SessionRow.purpose)
            .where(SessionRow.run_id == run.id, SessionRow.ended_at.is_not(None))
            .order_by(SessionRow.ended_at.desc())
            .limit(searched)
            .correlate(run)
            .subquery()
        )
        # Without an order of its own, as sorting would need all the `searched` rows: both databases return the rows
        # of an ordered subquery in its order, and stop after `count`.
        rewarded = (
            select(ended.c.reward)
            .where(ended.c.reward.is_not(None), ended.c.purpose == Purpose.TRAIN.value)
            .limit(count)
            .subquery()
        )
        # One text per run, as SQLite knows no lateral joins: only a subquery that returns one value may refer to the
        # run.
        rewards = select(func.aggregate_strings(cast(rewarded.c.reward, Text), " ")).scalar_subquery()
        statement = select(run.id, rewards.label("rewards"))
        if not with_archived:
            statement = statement.where(run.state != RunState.ARCHIVED.value)
        rows = self._connection.execute(statement)
        return {row.id: [float(text) for text in reversed(row.rewards.split())] for row in rows if row.rewards}

    def audits(self, versions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """Return the audits of versions, given as (run id, version), as stored JSON."""
        columns = (PolicyVersionRow.run_id, PolicyVersionRow.version)
        found: dict[tuple[str, int], str] = {}
        for part in chunks(versions):
            statement = select(*columns, cast(PolicyVersionRow.audit, Text).label("audit")).where(
                tuple_(*columns).in_(part)
            )
            found |= {(row.run_id, row.version): row.audit for row in self._connection.execute(statement)}
        return found
