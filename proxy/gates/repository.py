"""The rows that gates read and write: evidence of sessions and evaluations, and findings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, delete, func, insert, select, update

from proxy.contract.policy import VersionState
from proxy.contract.states import SessionState
from proxy.contract.trajectory import Purpose
from proxy.database.chunks import chunks
from proxy.database.rows import AnyRow
from proxy.database.tables import EvaluationResultRow, PolicyVersionRow, SessionRow, TurnRow, VersionFindingRow
from proxy.gates.findings import Finding
from proxy.versions.repository import UNDECIDED, WITHDRAWN, storable

MOST_SESSIONS = 2000
"""Sessions of a comparison, or of one side of a canary's, unless `canary.sessions` is more."""


class GateRepository:
    """Queries that run within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def undecided(self, run_id: str) -> list[AnyRow]:
        """Return the versions that wait for their gates, oldest first."""
        statement = _VERSIONS.where(PolicyVersionRow.run_id == run_id, PolicyVersionRow.state.in_(UNDECIDED))
        return list(self._connection.execute(statement.order_by(PolicyVersionRow.version)))

    def served(self, run_id: str, serving: int, most: int) -> list[AnyRow]:
        """Return the newest `most` good versions that have served, up to the serving one, newest first."""
        statement = _VERSIONS.where(
            PolicyVersionRow.run_id == run_id,
            PolicyVersionRow.version <= serving,
            PolicyVersionRow.served_at.is_not(None),
            PolicyVersionRow.state.not_in(WITHDRAWN),
        )
        return list(self._connection.execute(statement.order_by(PolicyVersionRow.version.desc()).limit(most)))

    def sessions(self, run_id: str, versions: Collection[int], *, since: float) -> list[AnyRow]:
        """Return id, version and reward of the newest sessions that one of these versions alone answered and that
        ended at `since` or later, in the order in which they ended."""
        newest = self._sessions(run_id, versions, since).order_by(SessionRow.ended_at.desc(), SessionRow.id.desc())
        return list(self._connection.execute(newest.limit(MOST_SESSIONS)))[::-1]

    def trial_sessions(self, run_id: str, version: int, *, since: float, most: int) -> list[AnyRow]:
        """Return the first `most` sessions that this version alone answered and that began and ended at `since` or
        later, in the order in which they ended.

        The first, because a test that goes on must keep the values that it has seen; and of one version, because a
        canary of a small share would be lost among the newest sessions of two.
        """
        statement = self._sessions(run_id, (version,), since).where(SessionRow.created_at >= since)
        return list(self._connection.execute(statement.order_by(SessionRow.ended_at, SessionRow.id).limit(most)))

    def _sessions(self, run_id: str, versions: Collection[int], since: float) -> Select[*tuple[Any, ...]]:
        return select(SessionRow.id, SessionRow.newest_version, SessionRow.reward, SessionRow.ended_at).where(
            SessionRow.run_id == run_id,
            SessionRow.ended_at >= since,
            SessionRow.state == SessionState.ENDED.value,
            SessionRow.newest_version.in_(sorted(versions)),
            SessionRow.oldest_version == SessionRow.newest_version,
            SessionRow.purpose == Purpose.TRAIN.value,
            SessionRow.origin.is_(None),
            SessionRow.erased_at.is_(None),
        )

    def calls(self, session_ids: Sequence[str]) -> list[AnyRow]:
        """Return what guards read of the calls of these sessions."""
        found: list[AnyRow] = []
        for part in chunks(session_ids):
            statement = select(
                TurnRow.session_id,
                TurnRow.state,
                TurnRow.finish_reason,
                func.length(TurnRow.output_ids).label("output_bytes"),
                (TurnRow.finished_at - TurnRow.started_at).label("seconds"),
                TurnRow.response,
            ).where(TurnRow.session_id.in_(part))
            found += self._connection.execute(statement)
        return found

    def results(self, run_id: str, version: int, suite: str) -> dict[str, float]:
        """Return the mean reward by task of a version's attempts at a suite."""
        statement = (
            select(EvaluationResultRow.task, func.avg(EvaluationResultRow.reward).label("reward"))
            .where(
                EvaluationResultRow.run_id == run_id,
                EvaluationResultRow.version == version,
                EvaluationResultRow.suite == suite,
            )
            .group_by(EvaluationResultRow.task)
        )
        return {row.task: float(row.reward) for row in self._connection.execute(statement)}

    def attempts(self, run_id: str, version: int, suite: str) -> list[AnyRow]:
        """Return all results of a version's attempts at a suite."""
        statement = select(EvaluationResultRow.__table__).where(
            EvaluationResultRow.run_id == run_id,
            EvaluationResultRow.version == version,
            EvaluationResultRow.suite == suite,
        )
        ordered = statement.order_by(EvaluationResultRow.task, EvaluationResultRow.attempt)
        return list(self._connection.execute(ordered))

    def save_results(
        self, run_id: str, version: int, suite: str, results: Sequence[Mapping[str, object]], *, now: float
    ) -> None:
        """Store results; those of the same task and attempt are replaced."""
        for result in results:
            values = {"reward": result["reward"], "session_id": result["session_id"], "created_at": now}
            key = {
                "run_id": run_id,
                "version": version,
                "suite": suite,
                "task": result["task"],
                "attempt": result["attempt"],
            }
            same = [getattr(EvaluationResultRow, name) == value for name, value in key.items()]
            if not self._connection.execute(update(EvaluationResultRow).where(*same).values(**values)).rowcount:
                self._connection.execute(insert(EvaluationResultRow).values(**key, **values))

    def findings(self, run_id: str, versions: Collection[int] | None = None) -> list[AnyRow]:
        """Return the findings about these versions, or about all, newest version first."""
        statement = select(VersionFindingRow.__table__).where(VersionFindingRow.run_id == run_id)
        if versions is not None:
            statement = statement.where(VersionFindingRow.version.in_(sorted(versions)))
        ordered = statement.order_by(VersionFindingRow.version.desc(), VersionFindingRow.gate)
        return list(self._connection.execute(ordered))

    def save(self, run_id: str, version: int, finding: Finding, *, now: float) -> None:
        """Store what a gate has found, in place of what it found before. Under the run's lock."""
        values = {
            "state": finding.state,
            "text": finding.text,
            "evidence": storable(finding.evidence),
            "updated_at": now,
        }
        same = (
            VersionFindingRow.run_id == run_id,
            VersionFindingRow.version == version,
            VersionFindingRow.gate == finding.gate,
        )
        if not self._connection.execute(update(VersionFindingRow).where(*same).values(**values)).rowcount:
            key = {"run_id": run_id, "version": version, "gate": finding.gate}
            self._connection.execute(insert(VersionFindingRow).values(**key, **values))

    def forget_watch(self, run_id: str, before: int) -> None:
        """Delete the findings of the watch about versions older than `before`: they served and were not bad."""
        self._connection.execute(
            delete(VersionFindingRow).where(
                VersionFindingRow.run_id == run_id,
                VersionFindingRow.version < before,
                VersionFindingRow.gate == "watch",
                VersionFindingRow.state != "failed",
            )
        )

    def start_shadow(self, run_id: str, version: int, *, now: float) -> bool:
        """Let a candidate answer prompts unseen. Return whether it was a candidate that did not."""
        statement = update(PolicyVersionRow).where(
            PolicyVersionRow.run_id == run_id,
            PolicyVersionRow.version == version,
            PolicyVersionRow.state == VersionState.CANDIDATE.value,
            PolicyVersionRow.shadow_at.is_(None),
        )
        return self._connection.execute(statement.values(shadow_at=now)).rowcount > 0

    def start_canary(self, run_id: str, version: int, *, now: float) -> bool:
        """Make a candidate the canary. Return whether it was a candidate."""
        statement = update(PolicyVersionRow).where(
            PolicyVersionRow.run_id == run_id,
            PolicyVersionRow.version == version,
            PolicyVersionRow.state == VersionState.CANDIDATE.value,
        )
        values = {"state": VersionState.CANARY.value, "canary_at": now}
        return self._connection.execute(statement.values(**values)).rowcount > 0


_VERSIONS = select(
    PolicyVersionRow.version,
    PolicyVersionRow.parent_version,
    PolicyVersionRow.state,
    PolicyVersionRow.metrics,
    PolicyVersionRow.created_at,
    PolicyVersionRow.shadow_at,
    PolicyVersionRow.canary_at,
    PolicyVersionRow.served_at,
)
