"""Enqueues the judging of sessions, in the transaction in which they end, and of answers, as they are recorded."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from sqlalchemy import Connection

from proxy.contract.identifiers import TurnId
from proxy.contract.states import Outcome
from proxy.lifecycle.outbox import enqueue, extend_payload, hasten, revive

# Sessions that failed or were cancelled say nothing about the policy, so nobody judges them.
GIVEN_UP = (Outcome.FAILED.value, Outcome.CANCELLED.value)

JUDGING = "judge"
"""The kind of job by which a judge scores a session (`proxy/judges`)."""


def enqueue_judging(
    connection: Connection, run_id: str, judges: Iterable[str], session_id: str, *, now: float, again: str = ""
) -> int:
    """Enqueue one job for each judge, and return how many are new.

    A session ends once, so its key is the judge's name and its id; `again` distinguishes a later judging, which is
    asked for after the judge has changed. A later judging that is dead or cancelled is tried again and counts as new.
    """
    new = 0
    for judge in judges:
        key, payload = _session_key(judge, session_id, again), {"judge": judge, "session_id": session_id}
        job_id = enqueue(connection, kind=JUDGING, key=key, payload=payload, now=now, run_id=run_id)
        # Only a person asks for a later judging. The end of a session, which may be reported twice, revives nothing.
        new += job_id is not None or (bool(again) and revive(connection, kind=JUDGING, key=key, now=now))
    return new


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison, by judges of the kinds `relative` and `pairwise`, of the answer `of` with further answers to its
    prompt, all of them turns of one session.

    It begins at `due_at`, in seconds since the epoch, unless `hasten_comparison` comes first.
    """

    judges: tuple[str, ...]
    of: TurnId
    due_at: float


def add_to_comparison(
    connection: Connection, comparison: Comparison, run_id: str, session_id: str, turn_id: str, *, now: float
) -> None:
    """Add a recorded answer to its comparison, one job for each judge, which the first answer enqueues.

    Use it in the transaction that records the answer, so that an answer whose process dies is compared too. Each
    answer then gets a reward of its own. The session may be open. An answer that comes after the comparison has begun
    is not compared: the others would get a second reward.
    """
    for judge in comparison.judges:
        key = _comparison_key(judge, session_id, comparison.of)
        payload = {"judge": judge, "session_id": session_id, "turns": [comparison.of, turn_id]}
        job_id = enqueue(
            connection,
            kind=JUDGING,
            key=key,
            payload=payload,
            now=now,
            run_id=run_id,
            not_before=comparison.due_at,
        )
        if job_id is None:
            extend_payload(connection, kind=JUDGING, key=key, list_name="turns", item=turn_id)


def hasten_comparison(connection: Connection, comparison: Comparison, session_id: str, *, now: float) -> None:
    """Let a comparison begin now, because no further answer comes."""
    for judge in comparison.judges:
        hasten(connection, kind=JUDGING, key=_comparison_key(judge, session_id, comparison.of), now=now)


def _session_key(judge: str, session_id: str, again: str) -> str:
    return f"{judge}:{session_id}{':' if again else ''}{again}"


def _comparison_key(judge: str, session_id: str, turn_id: str) -> str:
    return f"{judge}:{session_id}:turns:{turn_id}"
