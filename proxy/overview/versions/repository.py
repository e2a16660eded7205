"""The queries that compare two versions. Those of sessions read every session of the run once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, Subquery, case, func, select

from proxy.contract.states import Outcome
from proxy.contract.turn import FinishReason, TurnState
from proxy.database.chunks import chunks
from proxy.database.rows import AnyRow
from proxy.database.tables import PolicyVersionRow, SessionRow, TurnRow


class VersionDiffRepository:
    """Queries that run within one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def parents(self, run_id: str, *, after: int, up_to: int) -> dict[int, int | None]:
        """Return the parents of the versions after `after` up to `up_to`."""
        statement = select(PolicyVersionRow.version, PolicyVersionRow.parent_version).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version > after, PolicyVersionRow.version <= up_to
        )
        return {row.version: row.parent_version for row in self._connection.execute(statement)}

    def steps(self, run_id: str, versions: Sequence[int]) -> list[AnyRow]:
        """Return versions with their audits, oldest first."""
        found: list[AnyRow] = []
        for part in chunks(sorted(versions)):
            statement = (
                select(PolicyVersionRow.__table__)
                .where(PolicyVersionRow.run_id == run_id, PolicyVersionRow.version.in_(part))
                .order_by(PolicyVersionRow.version)
            )
            found += self._connection.execute(statement).all()
        return found

    def names(self, session_ids: Iterable[str]) -> dict[str, AnyRow]:
        """Return `task` and `external_id` by session."""
        statement = select(SessionRow.id, SessionRow.task, SessionRow.external_id).where(
            SessionRow.id.in_(list(session_ids))
        )
        return {row.id: row for row in self._connection.execute(statement)}

    def session_figures(self, run_id: str, versions: Sequence[int]) -> dict[int, AnyRow]:
        """Return `sessions`, `rewarded`, `reward`, `failed` and `calls` by version, of the sessions that one version
        alone answered."""
        failed = case((SessionRow.outcome == Outcome.FAILED.value, 1), else_=0)
        statement = (
            select(
                SessionRow.newest_version,
                func.count().label("sessions"),
                func.count(SessionRow.reward).label("rewarded"),
                func.avg(SessionRow.reward).label("reward"),
                func.sum(failed).label("failed"),
                func.sum(SessionRow.turn_count).label("calls"),
            )
            .where(
                SessionRow.run_id == run_id,
                SessionRow.newest_version.in_(versions),
                SessionRow.oldest_version == SessionRow.newest_version,
            )
            .group_by(SessionRow.newest_version)
        )
        return {row.newest_version: row for row in self._connection.execute(statement)}

    def call_figures(self, run_id: str, versions: Sequence[int]) -> dict[int, AnyRow]:
        """Return `calls`, `cut` and `seconds` (their mean) by version, of the same sessions."""
        cut = case((TurnRow.finish_reason == FinishReason.LENGTH.value, 1), else_=0)
        statement = (
            select(
                SessionRow.newest_version,
                func.count().label("calls"),
                func.sum(cut).label("cut"),
                func.avg(TurnRow.finished_at - TurnRow.started_at).label("seconds"),
            )
            .join(TurnRow, TurnRow.session_id == SessionRow.id)
            .where(
                TurnRow.state != TurnState.SHADOW.value,
                SessionRow.run_id == run_id,
                SessionRow.newest_version.in_(versions),
                SessionRow.oldest_version == SessionRow.newest_version,
            )
            .group_by(SessionRow.newest_version)
        )
        return {row.newest_version: row for row in self._connection.execute(statement)}

    def task_changes(self, run_id: str, before: int, after: int, *, rising: bool, limit: int) -> Sequence[AnyRow]:
        """Return `task`, `before`, `after` and the numbers of sessions, of the tasks that both versions answered and
        whose mean reward rose (or fell) most."""
        old, new = _by_task(run_id, before), _by_task(run_id, after)
        change = new.c.reward - old.c.reward
        statement = (
            select(
                old.c.task,
                old.c.reward.label("before"),
                new.c.reward.label("after"),
                old.c.sessions.label("sessions_before"),
                new.c.sessions.label("sessions_after"),
            )
            .join(new, new.c.task == old.c.task)
            .where(change > 0 if rising else change < 0)
            .order_by(change.desc() if rising else change, old.c.task)
            .limit(limit)
        )
        return self._connection.execute(statement).all()


def _by_task(run_id: str, version: int) -> Subquery:
    """Return the mean `reward` and the number of rewarded `sessions` by task, of a version's sessions."""
    return (
        select(SessionRow.task, func.avg(SessionRow.reward).label("reward"), func.count().label("sessions"))
        .where(
            SessionRow.run_id == run_id,
            SessionRow.newest_version == version,
            SessionRow.oldest_version == version,
            SessionRow.task.is_not(None),
            SessionRow.reward.is_not(None),
        )
        .group_by(SessionRow.task)
        .subquery()
    )
