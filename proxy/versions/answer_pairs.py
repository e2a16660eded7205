"""Record pairs of answers for the gates: the serving version's, which its caller has, and a candidate's, which nobody
saw."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, func, insert, select

from proxy.clock import Clock
from proxy.contract.identifiers import SessionId, TurnId, new_pair_id
from proxy.contract.policy import VersionState
from proxy.contract.turn import FinishReason, TurnState
from proxy.database.tables import AnswerPairRow, PolicyVersionRow, SessionRow, TurnRow
from proxy.database.unit_of_work import Database
from proxy.lifecycle.outbox import enqueue
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunView

PREFERRING = "prefer"
"""The kind of job by which a judge says which answer of a pair is better (`proxy/gates/preferences.py`)."""

# Pairs that a judge may fail to compare, as a multiple of those that the gate needs: so many are collected at most.
_SPARE_PAIRS = 2


class UnseenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's answer to the prompt of the turn `turn_id`.

    `state` is complete or failed. `seconds` is the time from the moment at which a slot of the engine was free.
    `response` is the answer in the form of `turns.response`.
    """

    version: int
    session_id: SessionId
    turn_id: TurnId
    state: TurnState
    finish_reason: FinishReason
    output_tokens: int
    seconds: float
    response: dict[str, Any]


class Recorded(NamedTuple):
    """Whether an answer was recorded, and whether the gates can use further pairs of the candidate."""

    is_recorded: bool
    wants_more: bool


class AnswerPairs:
    """Records pairs of answers, of all runs."""

    def __init__(self, *, database: Database, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock

    async def record(self, run: RunView, answer: UnseenAnswer) -> Recorded:
        """Commit an answer with its turn as a pair, and the job of the judge that compares them, if there is one.

        An answer is not recorded if the candidate is decided or has enough pairs, if its turn is erased, or if tokens
        of the turn come from several versions.
        """
        recorded = await self._database.commit(partial(_record, run, answer, now=self._clock()))
        if recorded.is_recorded and run.settings.release.preference.judge is not None:
            self._signals.jobs.notify()
        return recorded


def most_pairs(run: RunView) -> int:
    """Return how many pairs of a candidate and one serving version are collected."""
    release = run.settings.release
    return release.shadow.answers * (1 if release.preference.judge is None else _SPARE_PAIRS)


def _record(run: RunView, answer: UnseenAnswer, connection: Connection, *, now: float) -> Recorded:
    candidate = select(PolicyVersionRow.version).where(
        PolicyVersionRow.run_id == run.id,
        PolicyVersionRow.version == answer.version,
        PolicyVersionRow.state == VersionState.CANDIDATE.value,
        PolicyVersionRow.shadow_at.is_not(None),
    )
    if connection.execute(candidate).first() is None:
        return Recorded(is_recorded=False, wants_more=False)
    turn = (
        select(TurnRow.spans)
        .join(SessionRow, SessionRow.id == TurnRow.session_id)
        .where(TurnRow.id == answer.turn_id, SessionRow.erased_at.is_(None))
    )
    row = connection.execute(turn).one_or_none()
    versions = set() if row is None else {int(version) for version, _, _ in row.spans}
    if len(versions) != 1:
        return Recorded(is_recorded=False, wants_more=True)
    (against,) = versions
    of_pair = (
        AnswerPairRow.run_id == run.id,
        AnswerPairRow.version == answer.version,
        AnswerPairRow.against == against,
    )
    count = connection.execute(select(func.count()).select_from(AnswerPairRow).where(*of_pair)).scalar_one()
    if count >= most_pairs(run):
        return Recorded(is_recorded=False, wants_more=False)
    pair_id, judge = new_pair_id(), run.settings.release.preference.judge
    values = {
        "id": pair_id,
        "run_id": run.id,
        "version": answer.version,
        "against": against,
        "session_id": answer.session_id,
        "turn_id": answer.turn_id,
        "state": answer.state.value,
        "finish_reason": answer.finish_reason.value,
        "output_tokens": answer.output_tokens,
        "seconds": answer.seconds,
        "created_at": now,
        "response": answer.response,
    }
    connection.execute(insert(AnswerPairRow).values(values))
    if judge is not None and answer.state is TurnState.COMPLETE:
        enqueue(connection, kind=PREFERRING, key=pair_id, payload={"pair": pair_id}, now=now, run_id=run.id)
    return Recorded(is_recorded=True, wants_more=count + 1 < most_pairs(run))
