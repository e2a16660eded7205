"""Rows of runs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, delete, insert, or_, select, update

from proxy.contract.identifiers import RunId
from proxy.contract.policy import VersionState
from proxy.contract.states import RunState
from proxy.database.tables import (
    ApiKeyRow,
    ClaimRow,
    EventRow,
    GroupRow,
    PolicyVersionRow,
    RateLimitRow,
    RunRow,
    SessionRow,
)


class RunRepository:
    """Queries that run within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def by_name(self, name: str) -> Row[*tuple[Any, ...]] | None:
        return self._connection.execute(_RUNS.where(RunRow.name == name)).one_or_none()

    def by_id(self, run_id: str) -> Row[*tuple[Any, ...]] | None:
        return self._connection.execute(_RUNS.where(RunRow.id == run_id)).one_or_none()

    def by_name_or_id(self, name_or_id: str) -> Row[*tuple[Any, ...]] | None:
        statement = _RUNS.where(or_(RunRow.name == name_or_id, RunRow.id == name_or_id))
        # A run's name may equal another run's id; the name wins, as it does in model calls.
        return self._connection.execute(statement.order_by(RunRow.name != name_or_id).limit(1)).first()

    def all_by_age(self) -> list[Row[*tuple[Any, ...]]]:
        return list(self._connection.execute(_RUNS.order_by(RunRow.created_at, RunRow.id)).all())

    def insert(
        self,
        *,
        run_id: RunId,
        name: str,
        base_model: str,
        config: dict[str, Any],
        reward_rules: dict[str, Any],
        now: float,
    ) -> None:
        """Insert a run with its version 0, the base model, which counts as serving at once."""
        self._connection.execute(
            insert(RunRow).values(
                id=run_id,
                name=name,
                state=RunState.ACTIVE.value,
                base_model=base_model,
                config=config,
                reward_rules=reward_rules,
                head_version=0,
                serving_version=0,
                created_at=now,
            )
        )
        self._connection.execute(
            insert(PolicyVersionRow).values(
                run_id=run_id,
                version=0,
                parent_version=None,
                state=VersionState.SERVING.value,
                claim_ids=[],
                metrics={},
                audit=[],
                created_at=now,
                served_at=now,
            )
        )

    def has_history(self, run_id: str) -> bool:
        """Return whether the run has a session, a claim or a version above 0."""
        return any(
            self._connection.execute(select(table.run_id).where(table.run_id == run_id).limit(1)).first() is not None
            for table in (SessionRow, ClaimRow)
        ) or bool(
            self._connection.execute(
                select(PolicyVersionRow.version).where(
                    PolicyVersionRow.run_id == run_id, PolicyVersionRow.version > 0
                )
            ).first()
        )

    def delete(self, run_id: str) -> None:
        """Delete a run without history, and every row that refers to it."""
        # Referring rows first: PostgreSQL enforces the foreign keys statement by statement.
        for table in (ApiKeyRow, GroupRow, PolicyVersionRow, RateLimitRow, EventRow):
            self._connection.execute(delete(table).where(table.run_id == run_id))
        self._connection.execute(delete(RunRow).where(RunRow.id == run_id))

    def set_state(self, run_id: str, state: RunState, *, unless: RunState) -> bool:
        """Set a run's state. Return whether it changed; a run in the state `unless` keeps it."""
        changes = RunRow.state.not_in((state.value, unless.value))
        statement = update(RunRow).where(RunRow.id == run_id, changes).values(state=state.value)
        return self._connection.execute(statement).rowcount > 0

    def set_config(self, run_id: str, config: dict[str, Any]) -> None:
        self._connection.execute(update(RunRow).where(RunRow.id == run_id).values(config=config))


_RUNS = select(
    RunRow.id,
    RunRow.name,
    RunRow.state,
    RunRow.base_model,
    RunRow.config,
    RunRow.head_version,
    RunRow.serving_version,
    RunRow.created_at,
)
