"""Explain why a later version answers differently from an earlier one: steps, sessions, tasks and figures."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from proxy.contract.claim import TrajectoryAudit
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, NotFound
from proxy.overview.steps.assembly import audit_of, step_facts, step_item
from proxy.overview.versions.repository import VersionDiffRepository
from proxy.overview.versions.views import Mover, TaskChange, VersionDiff, VersionFigures

MOST_STEPS = 500
"""Steps between two versions. The audits of all of them are read, about 100 kB each."""

# Versions that an error names.
_SHOWN = 5


class VersionComparison:
    """Compares versions of all runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def compare(self, run_id: str, run_name: str, before: int, after: int, *, limit: int) -> VersionDiff:
        """Compare a version with a later one that was made from it; lists have at most `limit` entries.

        Raise NotFound for an unknown version, InvalidRequest if the later one was not made from the earlier one or
        too many steps are between them.
        """

        def read(connection: Connection) -> VersionDiff:
            repository = VersionDiffRepository(connection)
            parents = repository.parents(run_id, after=before, up_to=after)
            path = _path(run_name, parents, before, after)
            audited = [(row, audit_of(row.audit)) for row in repository.steps(run_id, path)]
            movers = _movers([(row.version, audit) for row, audit in audited], limit)
            names = repository.names(mover.session_id for mover in movers)
            sessions = repository.session_figures(run_id, (before, after))
            calls = repository.call_figures(run_id, (before, after))
            better, worse = (
                tuple(
                    TaskChange(**row._mapping)
                    for row in repository.task_changes(run_id, before, after, rising=rising, limit=limit)
                )
                for rising in (True, False)
            )
            return VersionDiff(
                run=run_name,
                before=_figures(before, sessions, calls),
                after=_figures(after, sessions, calls),
                steps=tuple(step_item(row, step_facts(audit)) for row, audit in audited),
                trained_sessions=sum(entry.trained_tokens > 0 for _, audit in audited for entry in audit),
                movers=tuple(_named(mover, names.get(mover.session_id)) for mover in movers),
                better=better,
                worse=worse,
            )

        return await self._database.read(read)


def _path(run_name: str, parents: Mapping[int, int | None], before: int, after: int) -> list[int]:
    """Return the versions that lead from `before`, which is left out, to `after`. Raise NotFound, InvalidRequest."""
    if after <= before:
        raise InvalidRequest("give the earlier version first, and a later one to compare it with", param="to")
    if after not in parents:
        raise NotFound(f"the run {run_name!r} has no version {after}", param="to")
    path: list[int] = []
    version: int | None = after
    while version is not None and version > before:
        path.append(version)
        version = parents[version]
    if version != before:
        origins = [*path[1:], *([] if version is None else [version])][:_SHOWN]
        named = ", ".join(map(str, origins))
        raise InvalidRequest(f"version {after} was not made from version {before}, but from {named}", param="from")
    if len(path) > MOST_STEPS:
        raise InvalidRequest(
            f"{len(path)} steps are between the versions, and at most {MOST_STEPS} are compared", param="from"
        )
    return path


def _movers(audits: Sequence[tuple[int, Sequence[TrajectoryAudit]]], limit: int) -> list[Mover]:
    """Return the sessions with the largest absolute pull, largest first."""

    def pulls() -> Iterator[tuple[float, int, TrajectoryAudit]]:
        for version, audit in audits:
            for entry in audit:
                pull = entry.advantage * entry.trained_tokens
                if math.isfinite(pull) and pull:
                    yield pull, version, entry

    total = math.fsum(abs(pull) for pull, _, _ in pulls())
    largest = heapq.nlargest(limit, pulls(), key=lambda each: (abs(each[0]), each[2].session_id))
    return [
        Mover(
            session_id=entry.session_id,
            version=version,
            reward=entry.reward,
            advantage=entry.advantage,
            trained_tokens=entry.trained_tokens,
            pull=pull,
            share=abs(pull) / total,
        )
        for pull, version, entry in largest
    ]


def _named(mover: Mover, row: AnyRow | None) -> Mover:
    return mover if row is None else msgspec.structs.replace(mover, task=row.task, name=row.external_id)


def _figures(version: int, sessions: Mapping[int, AnyRow], calls: Mapping[int, AnyRow]) -> VersionFigures:
    row, call = sessions.get(version), calls.get(version)
    if row is None:
        return VersionFigures(version=version)
    return VersionFigures(
        version=version,
        sessions=row.sessions,
        rewarded=row.rewarded,
        reward_mean=row.reward,
        failed_share=row.failed / row.sessions,
        calls_per_session=float(row.calls / row.sessions),
        cut_share=None if call is None else call.cut / call.calls,
        call_seconds=None if call is None else call.seconds,
    )
