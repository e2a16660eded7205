"""Read what gates have found, and take results of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.policy import VersionState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import NotFound
from proxy.gates.repository import GateRepository
from proxy.gates.views import EvaluationResult, EvaluationView, FindingView, VersionFindings
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunView
from proxy.versions.repository import VersionRepository


class GateService:
    """Findings and evaluations of all runs."""

    def __init__(self, *, database: Database, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock

    async def findings(self, run: RunView, version: int) -> VersionFindings:
        """Return a version with its findings. Raise NotFound."""

        def read(connection: Connection) -> VersionFindings:
            row = _existing(connection, run, version)
            return _view(row, GateRepository(connection).findings(run.id, (version,)))

        return await self._database.read(read)

    async def newest_findings(self, run: RunView, most: int) -> tuple[VersionFindings, ...]:
        """Return the newest `most` versions that have findings, newest first."""

        def read(connection: Connection) -> tuple[VersionFindings, ...]:
            rows = GateRepository(connection).findings(run.id)
            versions = sorted({row.version for row in rows}, reverse=True)[:most]
            known = VersionRepository(connection)
            return tuple(
                _view(known.version(run.id, version), [row for row in rows if row.version == version])
                for version in versions
            )

        return await self._database.read(read)

    async def evaluation(self, run: RunView, version: int, suite: str) -> EvaluationView:
        """Return a version's results at a suite. Raise NotFound for an unknown version."""

        def read(connection: Connection) -> list[AnyRow]:
            _existing(connection, run, version)
            return GateRepository(connection).attempts(run.id, version, suite)

        rows = await self._database.read(read)
        return EvaluationView(
            version=version,
            suite=suite,
            results=tuple(
                EvaluationResult(task=row.task, attempt=row.attempt, reward=row.reward, session_id=row.session_id)
                for row in rows
            ),
        )

    async def add_results(
        self, run: RunView, version: int, suite: str, results: Sequence[dict[str, Any]]
    ) -> EvaluationView:
        """Store results of a version at a suite; those of the same task and attempt are replaced. Raise NotFound."""
        now = self._clock()

        def write(connection: Connection) -> None:
            _existing(connection, run, version)
            # Two posts of the same attempt would both insert it without the lock.
            VersionRepository(connection).run(run.id, lock=True)
            GateRepository(connection).save_results(run.id, version, suite, results, now=now)

        await self._database.commit(write)
        self._signals.events.notify()
        return await self.evaluation(run, version, suite)


def _existing(connection: Connection, run: RunView, version: int) -> AnyRow:
    row = VersionRepository(connection).find(run.id, version)
    if row is None:
        raise NotFound(f"the run {run.name!r} has no version {version}", param="version")
    return row


def _view(row: AnyRow, findings: Sequence[AnyRow]) -> VersionFindings:
    return VersionFindings(
        version=row.version,
        parent=row.parent_version,
        state=VersionState(row.state),
        created_at=row.created_at,
        shadow_at=row.shadow_at,
        canary_at=row.canary_at,
        reason=row.rejected_because,
        findings=tuple(
            msgspec.convert({name: getattr(found, name) for name in FindingView.__struct_fields__}, FindingView)
            for found in findings
        ),
    )
