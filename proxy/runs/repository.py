"""Rows of runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, Select, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased

from proxy.contract.identifiers import RunId
from proxy.contract.policy import VersionState
from proxy.contract.states import ClaimState, RunState
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    USED_LIMITS,
    ApiKeyRow,
    ClaimRow,
    EvaluationResultRow,
    EventRow,
    GroupRow,
    PolicyVersionRow,
    ProjectRow,
    RunRow,
    SessionRow,
    VersionFindingRow,
    VersionHoldRow,
    WebhookRow,
)
from proxy.errors import Conflict


class RunRepository:
    """Queries that run within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def by_name(self, name: str, *, lock: bool = False) -> AnyRow | None:
        """Find a run by its name. `lock` is that of `by_id`."""
        return self._find(_RUNS.where(RunRow.name == name), lock=lock)

    def by_id(self, run_id: str, *, lock: bool = False) -> AnyRow | None:
        """Find a run by its id. With `lock`, no other transaction changes the row until this one ends."""
        return self._find(_RUNS.where(RunRow.id == run_id), lock=lock)

    def _find(self, statement: Select[*tuple[Any, ...]], *, lock: bool) -> AnyRow | None:
        # `key_share`: sessions and turns that refer to the run are inserted meanwhile.
        return self._connection.execute(
            statement.with_for_update(key_share=True, of=RunRow) if lock else statement
        ).one_or_none()

    def version(self, run_id: str, version: int) -> AnyRow | None:
        """Find a version by its number."""
        statement = select(PolicyVersionRow.__table__).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version
        )
        return self._connection.execute(statement).one_or_none()

    def begun_from(self, run_id: str) -> list[AnyRow]:
        """Return `name` and `begun_from_version` of the runs that begin from a version of this one."""
        statement = select(RunRow.name, RunRow.begun_from_version).where(RunRow.begun_from_run_id == run_id)
        return list(self._connection.execute(statement.order_by(RunRow.created_at, RunRow.id)).all())

    def by_name_or_id(self, name_or_id: str) -> AnyRow | None:
        statement = _RUNS.where(or_(RunRow.name == name_or_id, RunRow.id == name_or_id))
        # A run's name may equal another run's id; the name wins, as it does in model calls.
        return self._connection.execute(statement.order_by(RunRow.name != name_or_id).limit(1)).first()

    def all_by_age(self, project_id: str | None = None) -> list[AnyRow]:
        """Return all runs, or those of a project, oldest first."""
        statement = _RUNS if project_id is None else _RUNS.where(RunRow.project_id == project_id)
        return list(self._connection.execute(statement.order_by(RunRow.created_at, RunRow.id)).all())

    def insert(
        self,
        *,
        run_id: RunId,
        name: str,
        base_model: str,
        project_id: str,
        config: dict[str, Any],
        reward_rules: dict[str, Any],
        now: float,
        begun_from: tuple[RunId, int] | None = None,
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        """Insert a run with its version 0, which counts as serving at once: the base model, or the weights in the
        columns `weights` of the version `begun_from` of another run.

        Raise Conflict if there is a run of this name.
        """
        source, source_version = begun_from or (None, None)
        try:
            self._connection.execute(
                insert(RunRow).values(
                    id=run_id,
                    name=name,
                    project_id=project_id,
                    state=RunState.ACTIVE.value,
                    base_model=base_model,
                    config=config,
                    reward_rules=reward_rules,
                    head_version=0,
                    serving_version=0,
                    begun_from_run_id=source,
                    begun_from_version=source_version,
                    created_at=now,
                )
            )
        except IntegrityError as error:
            raise Conflict(
                f"there is a run called {name!r} already: choose another name, or delete that run", param="name"
            ) from error
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
                **(weights or {}),
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

    def has_leased_claims(self, run_id: str, now: float) -> bool:
        """Return whether a trainer works on trajectories of the run now."""
        statement = select(ClaimRow.id).where(
            ClaimRow.run_id == run_id, ClaimRow.state == ClaimState.LEASED.value, ClaimRow.lease_expires_at > now
        )
        return self._connection.execute(statement.limit(1)).first() is not None

    def delete(self, run_id: str) -> None:
        """Delete a run that nobody has used yet, and every row that refers to it."""
        delete_used_limits(self._connection, run_id)
        # Referring rows first: PostgreSQL enforces the foreign keys statement by statement.
        for table in (*_OF_VERSIONS, ApiKeyRow, GroupRow, PolicyVersionRow, EventRow, WebhookRow):
            self._connection.execute(delete(table).where(table.run_id == run_id))
        self._connection.execute(delete(RunRow).where(RunRow.id == run_id))

    def set_state(self, run_id: str, state: RunState, *, among: Collection[RunState]) -> bool:
        """Set the state of a run that is in one of the states `among`. Return whether it was."""
        changes = RunRow.state.in_([each.value for each in among])
        statement = update(RunRow).where(RunRow.id == run_id, changes).values(state=state.value)
        return self._connection.execute(statement).rowcount > 0

    def set_project(self, run_id: str, project_id: str) -> None:
        self._connection.execute(update(RunRow).where(RunRow.id == run_id).values(project_id=project_id))

    def set_config(self, run_id: str, config: dict[str, Any]) -> None:
        self._connection.execute(update(RunRow).where(RunRow.id == run_id).values(config=config))


def delete_used_limits(connection: Connection, run_id: str) -> None:
    """Delete what was used of the limits of a run and of its keys, before the keys are deleted."""
    keys = select(ApiKeyRow.id).where(ApiKeyRow.run_id == run_id)
    for used in USED_LIMITS:
        connection.execute(delete(used).where(or_(used.subject_id == run_id, used.subject_id.in_(keys))))


# They refer to keys, so they are deleted before those.
_OF_VERSIONS = (VersionHoldRow, VersionFindingRow, EvaluationResultRow)

_SOURCE = aliased(RunRow)

_RUNS = (
    select(
        RunRow.id,
        RunRow.name,
        RunRow.state,
        RunRow.base_model,
        RunRow.config,
        RunRow.head_version,
        RunRow.serving_version,
        RunRow.begun_from_version,
        # A subquery, because PostgreSQL locks no rows of an outer join.
        select(_SOURCE.name).where(_SOURCE.id == RunRow.begun_from_run_id).scalar_subquery().label("begun_from_run"),
        RunRow.created_at,
        RunRow.project_id,
        ProjectRow.name.label("project"),
        ProjectRow.settings.label("project_settings"),
        # Deleted runs exist only for `runs/deletion.py`.
    )
    .join(ProjectRow, ProjectRow.id == RunRow.project_id)
    .where(RunRow.state != RunState.DELETED.value)
)
