"""Transactions of leases: find due jobs, lease them, and end attempts that nobody else ends."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, MutableMapping, Sequence

from sqlalchemy import Connection

from proxy.jobs.fairness import fair_order, rotated
from proxy.jobs.kinds import JobKind, JobKinds
from proxy.jobs.lease import Lease
from proxy.jobs.repository import JobRepository
from proxy.lifecycle.events import append_event

# Leases that one transaction ends after they passed; other writes wait meanwhile.
_EXPIRED_AT_ONCE = 100
# The pause before the next attempt at a job of a kind that this process does not know.
_UNKNOWN_PAUSE_SECONDS = 30.0

Found = Mapping[str, Sequence[str]]
"""Ids of due jobs by kind."""


def find_due(
    connection: Connection,
    kinds: JobKinds,
    *,
    before: float,
    want: int,
    last_runs: Mapping[str, str],
    sent_before: float | None = None,
) -> Found:
    """Return up to `want` jobs that were due at `before`, shared fairly among kinds and, within a kind, among runs.

    No kind gets more than its concurrency leaves room for. `last_runs` has by kind the run that was first the last
    time: equals take turns. `sent_before`: omit jobs sent to the broker since then, which count as running.
    """
    repository = JobRepository(connection)
    found: dict[str, list[str]] = {}
    busy_kinds: dict[str, int] = {}
    for kind in kinds:
        runs = repository.runs_waiting(kind.name)
        if not runs:
            continue
        busy = repository.busy(kind.name, sent_since=sent_before)
        busy_kinds[kind.name] = sum(busy.values())
        room = min(want, kind.concurrency - busy_kinds[kind.name])
        if room < 1:
            continue
        # A stable sort: among runs with as many running jobs, the rotation decides.
        runs = sorted(rotated(runs, last_runs.get(kind.name)), key=lambda run: busy.get(run, 0))
        waiting = {}
        for run in runs:
            jobs = repository.due(kind.name, run, before=before, limit=room, sent_before=sent_before)
            if jobs:
                waiting[run] = jobs
            if len(waiting) >= room:
                break
        found[kind.name] = fair_order(waiting, busy, room)
    shared = set(fair_order(found, busy_kinds, want))
    return {kind: [job for job in jobs if job in shared] for kind, jobs in found.items()}


def lease_found(
    connection: Connection,
    kinds: JobKinds,
    found: Found,
    *,
    worker: str,
    seconds: float,
    now: float,
    last_runs: MutableMapping[str, str],
) -> list[Lease]:
    """Lease the found jobs that are still due, as far as the concurrency of their kinds allows."""
    repository = JobRepository(connection)
    leases: list[Lease] = []
    # In the order of their names, so that two processes that lock the same kinds cannot deadlock.
    for name, job_ids in sorted(found.items()):
        kind = kinds.find(name)
        if kind is None or not job_ids:
            continue
        repository.lock_kind(name)
        room = kind.concurrency - sum(repository.busy(name).values())
        if room > 0:
            owner = f"{worker}:{secrets.token_hex(8)}"
            leased = repository.lease(job_ids[:room], owner=owner, until=now + seconds, now=now)
            leases += leased
            if leased:
                last_runs[name] = leased[0].run_id or ""
    return leases


def record_failure(
    connection: Connection,
    kind: JobKind | None,
    lease: Lease,
    error: str,
    *,
    now: float,
    refused: bool = False,
    expired_by: float | None = None,
) -> str | None:
    """End a failed attempt; return `failed`, `dead`, or None if the lease is no longer the owner's.

    A job that is dead is reported in the event log. `refused`: no further attempt can succeed.
    """
    repository = JobRepository(connection)
    if not refused and (kind is None or lease.attempt < kind.attempts):
        pause = _UNKNOWN_PAUSE_SECONDS if kind is None else kind.pause_after(lease.attempt)
        failed = repository.fail(lease, error=error, due_at=now + pause, now=now, expired_by=expired_by)
        return "failed" if failed else None
    if not repository.bury(lease, error=error, now=now, expired_by=expired_by):
        return None
    # The run may have been deleted since the job was enqueued.
    run_id = lease.run_id if lease.run_id is not None and repository.run_exists(lease.run_id) else None
    data = {"job": lease.id, "kind": lease.kind, "key": lease.key, "attempts": lease.attempt, "error": error[:300]}
    append_event(connection, run_id=run_id, kind="job.dead", data=data, now=now)
    return "dead"


def expire_some(connection: Connection, kinds: JobKinds, *, now: float) -> list[tuple[Lease, str]]:
    """Fail attempts whose lease has passed: their worker died or cannot reach the store. Return each with `failed` or
    `dead`."""
    ended = []
    for lease in JobRepository(connection).expired(now, _EXPIRED_AT_ONCE):
        error = f"the worker {lease.owner.rpartition(':')[0]} stopped without ending the attempt"
        state = record_failure(connection, kinds.find(lease.kind), lease, error, now=now, expired_by=now)
        if state is not None:
            ended.append((lease, state))
    return ended
