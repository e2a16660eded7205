"""Enqueues the judging of sessions, in the transaction in which they end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection

from proxy.contract.states import Outcome
from proxy.lifecycle.outbox import enqueue

# Sessions that failed or were cancelled say nothing about the policy, so nobody judges them.
GIVEN_UP = (Outcome.FAILED.value, Outcome.CANCELLED.value)

JUDGING = "judge"
"""The kind of job by which a judge scores a session (`proxy/judges`)."""


def enqueue_judging(
    connection: Connection, run_id: str, judges: Iterable[str], session_id: str, *, now: float, again: str = ""
) -> int:
    """Enqueue one job for each judge, and return how many are new.

    A session ends once, so its key is the judge's name and its id; `again` distinguishes a later judging, which is
    asked for after the judge has changed.
    """
    enqueued = [
        enqueue(
            connection,
            kind=JUDGING,
            key=f"{judge}:{session_id}{':' if again else ''}{again}",
            payload={"judge": judge, "session_id": session_id},
            now=now,
            run_id=run_id,
        )
        for judge in judges
    ]
    return sum(job_id is not None for job_id in enqueued)


def enqueue_comparison(
    connection: Connection,
    run_id: str,
    judges: Iterable[str],
    session_id: str,
    turn_ids: Sequence[str],
    *,
    now: float,
) -> int:
    """Enqueue the comparison of several answers to the same conversation, turns of one session, by judges of the
    kinds `relative` and `pairwise`. Return how many of the jobs are new.

    Each turn then gets a reward of its own. The session may be open. The same turns are compared once by each judge.
    """
    turns = sorted(turn_ids)
    key = hashlib.sha256(" ".join(turns).encode()).hexdigest()[:32]
    enqueued = [
        enqueue(
            connection,
            kind=JUDGING,
            key=f"{judge}:{session_id}:turns:{key}",
            payload={"judge": judge, "session_id": session_id, "turns": turns},
            now=now,
            run_id=run_id,
        )
        for judge in judges
    ]
    return sum(job_id is not None for job_id in enqueued)
