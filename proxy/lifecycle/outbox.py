"""The outbox: background work is enqueued in the transaction of the change that causes it.

Either both are committed or neither, so a process that dies at any moment neither loses work nor creates work for a
change that never happened. `proxy/jobs` runs the work.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, null, select, update
from sqlalchemy.dialects import postgresql, sqlite

from proxy.contract.identifiers import JobId, new_job_id
from proxy.contract.states import JobState
from proxy.database.tables import JobRow

MAX_PAYLOAD_BYTES = 64 << 10
"""A payload names rows of the store. Larger data belongs into a table of its own."""
MAX_KEY_CHARACTERS = 500
NO_SUCCESS = (JobState.DEAD.value, JobState.CANCELLED.value)
"""States of jobs that ended without a success."""


def enqueue(
    connection: Connection,
    *,
    kind: str,
    key: str,
    payload: dict[str, Any],
    now: float,
    run_id: str | None = None,
    not_before: float | None = None,
) -> JobId | None:
    """Enqueue a job of this kind and return its id; None if the kind already has a job of this key.

    `key` is the idempotency key: choose one that the cause determines, such as the id of a session and a fingerprint.
    A key may be used again once its job was removed, some days after it finished. `run_id` is the run whose share of
    the workers the job takes. `not_before` is in seconds since the epoch. Call `signals.jobs.notify()` after the
    commit, so that the worker of this process finds the job at once instead of within a second.

    Raise ValueError for a payload that is too large and for a bad key, TypeError for a payload that is no JSON.
    """
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise ValueError(f"a job's key has 1 to {MAX_KEY_CHARACTERS} characters, not {len(key)}")
    if not_before is not None and not math.isfinite(not_before):
        raise ValueError("not_before must be a finite number of seconds since the epoch")
    size = len(msgspec.json.encode(payload))
    if size > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a job's payload has at most {MAX_PAYLOAD_BYTES} bytes, not {size}: store ids in it")
    job_id = new_job_id()
    # The statement waits for another transaction that is inserting the same key, and sees its outcome.
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = (
        insert(JobRow)
        .values(
            id=job_id,
            kind=kind,
            key=key,
            run_id=run_id or "",
            state=JobState.WAITING.value,
            payload=payload,
            attempts=0,
            due_at=now if not_before is None else max(now, not_before),
            created_at=now,
        )
        .on_conflict_do_nothing(index_elements=["kind", "key"])
        .returning(JobRow.id)
    )
    return job_id if connection.execute(statement).first() is not None else None


def extend_payload(connection: Connection, *, kind: str, key: str, list_name: str, item: str) -> bool:
    """Append `item` to a list in the payload of a pending job, unless the list has it. Return whether the job was
    pending."""
    # Locked, because two transactions that read the same list would each write it without the other's item.
    found = select(JobRow.id, JobRow.payload).where(_is_pending(kind, key)).with_for_update()
    row = connection.execute(found).one_or_none()
    if row is not None and item not in row.payload[list_name]:
        payload = {**row.payload, list_name: [*row.payload[list_name], item]}
        connection.execute(update(JobRow).where(JobRow.id == row.id).values(payload=payload))
    return row is not None


def hasten(connection: Connection, *, kind: str, key: str, now: float) -> None:
    """Make a job due now that waits for a later time. Call `signals.jobs.notify()` after the commit."""
    later = and_(_is_pending(kind, key), JobRow.due_at > now)
    connection.execute(update(JobRow).where(later).values(due_at=now))


def revive(connection: Connection, *, kind: str, key: str, now: float) -> bool:
    """Make a dead or cancelled job due now, with all of its attempts, and return whether there was one."""
    ended = and_(JobRow.kind == kind, JobRow.key == key, JobRow.state.in_(NO_SUCCESS))
    values = {"state": JobState.WAITING.value, "attempts": 0, "due_at": now, "finished_at": null()}
    revived = update(JobRow).where(ended).values(**values, dispatched_at=null())
    return connection.execute(revived).rowcount == 1


def _is_pending(kind: str, key: str) -> ColumnElement[bool]:
    pending = (JobState.WAITING.value, JobState.FAILED.value)
    return and_(JobRow.kind == kind, JobRow.key == key, JobRow.state.in_(pending))
