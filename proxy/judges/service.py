"""The handler of judging jobs: from a session to a reward and a judgement."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import RewardId, new_judgement_id, new_reward_id
from proxy.contract.states import TrainingState
from proxy.database.unit_of_work import Database
from proxy.feedback.repository import FeedbackRepository
from proxy.jobs.kinds import JobPostponed, JobRefused, Json, RunningJob
from proxy.judges.fingerprints import fingerprint
from proxy.judges.judging import Judged, judge_transcript
from proxy.judges.models import JudgeModels
from proxy.judges.repository import JudgementRepository
from proxy.judges.transcripts import Transcript, has_answer, transcript_of
from proxy.lifecycle.judging import GIVEN_UP
from proxy.lifecycle.lifecycle import settle
from proxy.lifecycle.signals import Signals
from proxy.settings import JudgeSettings, RunSettings
from proxy.transfer.reading import TransferReader

_DAY_SECONDS = 86400.0
# How soon a raised budget takes effect. Each waiting job costs a query and a write in every pause.
_BUDGET_PAUSE_SECONDS = 600.0
_WITH_THE_TRAINER = (TrainingState.LEASED.value, TrainingState.CONSUMED.value)


class JudgeObserver(Protocol):
    """Receives judgements, for metrics. It must neither raise nor block."""

    def session_judged(self, *, outcome: str, prompt_tokens: int, completion_tokens: int) -> None: ...

    def rewards_recorded(self, entries: int, *, effect: str) -> None: ...


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A session that a judge is to score, with the judge as its run has it now."""

    run_id: str
    session_id: str
    name: str
    judge: JudgeSettings
    fingerprint: str
    transcript: Transcript
    reward_id: str | None
    """The reward of this judge for this content, if there is one."""


class Skipped(msgspec.Struct, frozen=True):
    """Why there is nothing to judge."""

    reason: str


class JudgingService:
    """Runs jobs of the kind `judge`."""

    def __init__(
        self, database: Database, models: JudgeModels, signals: Signals, clock: Clock, observer: JudgeObserver
    ) -> None:
        self._database = database
        self._models = models
        self._signals = signals
        self._clock = clock
        self._observer = observer

    async def run(self, job: RunningJob) -> Json | None:
        """Judge the session that the job names.

        The reward, the judgement and the completion are one transaction. If the process dies before it, the next
        attempt asks the model again; nothing counts twice.
        """
        subject = await self._database.read(lambda connection: find_subject(connection, job))
        if isinstance(subject, Skipped):
            return {"skipped": subject.reason}
        if subject.reward_id is not None:
            return {"reward_id": subject.reward_id, "repeated": True}
        await self._postpone_over_budget(subject)
        judged = await judge_transcript(self._models, subject.judge, subject.transcript)
        if judged.failure is not None:
            await self._record_failure(subject, judged, judged.failure)
            raise judged.failure
        reward_id = new_reward_id()
        changed, late = await job.complete(
            lambda connection: _record(connection, subject, judged, reward_id, self._clock()),
            result={"reward_id": reward_id, "score": judged.verdict.score if judged.verdict is not None else None},
        )
        if changed:
            self._signals.trajectories.notify()
        self._observer.rewards_recorded(1, effect="recorded_after_training" if late else "recorded")
        self._count("scored", judged)
        return None

    async def _postpone_over_budget(self, subject: Subject) -> None:
        """Raise JobPostponed if the judge has used the tokens that it may use in a day."""
        budget = subject.judge.tokens_per_day
        if budget is None:
            return
        since = self._clock() - _DAY_SECONDS
        used = await self._database.read(
            lambda connection: JudgementRepository(connection).tokens_since(subject.run_id, subject.name, since)
        )
        if used >= budget:
            reason = f"the judge {subject.name!r} has used {used} tokens in 24 hours, of {budget} (tokens_per_day)"
            raise JobPostponed(reason, seconds=_BUDGET_PAUSE_SECONDS)

    async def _record_failure(self, subject: Subject, judged: Judged, failure: Exception) -> None:
        """Record what a failed attempt cost and why it failed."""
        if isinstance(failure, JobPostponed) and not judged.completion_tokens:
            # Nothing was spent, and it may be repeated for days while a quota is used up.
            return
        now = self._clock()
        await self._database.commit(
            lambda connection: JudgementRepository(connection).add(
                _judgement(subject, judged, reward_id=None, error=str(failure), now=now)
            )
        )
        self._count("failed", judged)

    def _count(self, outcome: str, judged: Judged) -> None:
        self._observer.session_judged(
            outcome=outcome, prompt_tokens=judged.prompt_tokens, completion_tokens=judged.completion_tokens
        )


def find_subject(connection: Connection, job: RunningJob) -> Subject | Skipped:
    """Return what the job is about. Raise JobRefused for a session that was erased or deleted."""
    repository = JudgementRepository(connection)
    name, session_id, run_id = str(job.payload["judge"]), str(job.payload["session_id"]), job.run_id or ""
    run = repository.run(run_id)
    if run is None:
        raise JobRefused("the run was deleted")
    settings = RunSettings.model_validate(run.config)
    judge = settings.judges.get(name)
    if judge is None:
        return Skipped(f"the run has no judge {name!r} any more")
    record = TransferReader(connection).named([session_id], rules=settings.reward_rules).get(session_id)
    if record is None:
        raise JobRefused("the session was erased")
    if record.outcome in GIVEN_UP:
        return Skipped(f"the session's outcome is {record.outcome}")
    if not has_answer(record.messages):
        return Skipped("the session has no answer to judge")
    transcript = transcript_of(record.messages, task=record.task, max_characters=judge.max_characters)
    form = fingerprint(judge)
    return Subject(
        run_id=run_id,
        session_id=session_id,
        name=name,
        judge=judge,
        fingerprint=form,
        transcript=transcript,
        reward_id=repository.scored(session_id, name, form, transcript.digest),
    )


def _record(
    connection: Connection, subject: Subject, judged: Judged, reward_id: RewardId, now: float
) -> tuple[bool, bool]:
    """Write the reward and the judgement. Return whether the session's training state changed, and whether a trainer
    had the session already. Raise JobRefused if the session was erased meanwhile."""
    assert judged.verdict is not None
    feedback = FeedbackRepository(connection)
    (session,) = feedback.sessions([subject.session_id]) or (None,)
    if session is None or session.erased_at is not None:
        raise JobRefused("the session was erased")
    late = session.training in _WITH_THE_TRAINER
    feedback.insert(
        [
            {
                "id": reward_id,
                "run_id": subject.run_id,
                "session_id": subject.session_id,
                "turn_id": None,
                "name": subject.judge.reward or subject.name,
                "value": judged.verdict.score,
                "source": f"judge:{subject.name}",
                "comment": _comment(subject, judged),
                # Clients' keys end with a control character and a name, so none of them is equal to this one.
                "idempotency_key": f"judge:{subject.name}:{subject.fingerprint}:{subject.session_id}:"
                f"{subject.transcript.digest}",
                "after_training": late,
                "created_at": now,
            }
        ]
    )
    row = _judgement(subject, judged, reward_id=reward_id, error=None, now=now)
    JudgementRepository(connection).add(row)
    return bool(settle(connection, [subject.session_id], now=now).changed), late


def _comment(subject: Subject, judged: Judged) -> str:
    assert judged.verdict is not None
    cut = "[the judge was shown a part of the conversation] " if subject.transcript.is_cut else ""
    return cut + judged.verdict.rationale


def _judgement(
    subject: Subject, judged: Judged, *, reward_id: RewardId | None, error: str | None, now: float
) -> dict[str, Any]:
    return {
        "id": new_judgement_id(),
        "run_id": subject.run_id,
        "session_id": subject.session_id,
        "judge": subject.name,
        "fingerprint": subject.fingerprint,
        "digest": subject.transcript.digest,
        "reward_id": reward_id,
        "score": judged.verdict.score if judged.verdict is not None else None,
        "votes": list(judged.votes),
        "invalid_votes": judged.invalid_votes,
        "spread": judged.verdict.spread if judged.verdict is not None else None,
        "is_cut": subject.transcript.is_cut,
        "prompt_tokens": judged.prompt_tokens,
        "completion_tokens": judged.completion_tokens,
        "cost": judged.cost,
        "error": error,
        "created_at": now,
    }
