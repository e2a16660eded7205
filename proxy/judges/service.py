"""The handler of judging jobs: from a session, or a group of them, to rewards and judgements."""

from __future__ import annotations

from typing import Protocol

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.jobs.kinds import JobPostponed, Json, RunningJob
from proxy.judges.budget import postpone_over_budget
from proxy.judges.kinds import KINDS
from proxy.judges.prompts import Prompts
from proxy.judges.reader import open_reader, task_of
from proxy.judges.recording import SessionsErased, record, record_failure
from proxy.judges.repository import JudgementRepository
from proxy.judges.subjects import Judged, NotYet, Skipped, Subject, Usage
from proxy.judges.tools import Tools
from proxy.lifecycle.signals import Signals


class JudgeObserver(Protocol):
    """Receives judgements, for metrics. It must neither raise nor block."""

    def session_judged(self, *, outcome: str, prompt_tokens: int, completion_tokens: int) -> None: ...

    def rewards_recorded(self, entries: int, *, effect: str) -> None: ...


class JudgingService:
    """Runs jobs of the kind `judge`."""

    def __init__(
        self,
        database: Database,
        tools: Tools,
        prompts: Prompts,
        signals: Signals,
        clock: Clock,
        observer: JudgeObserver,
    ) -> None:
        self._database = database
        self._tools = tools
        self._prompts = prompts
        self._signals = signals
        self._clock = clock
        self._observer = observer

    async def run(self, job: RunningJob) -> Json | None:
        """Judge what the job names.

        The rewards, the judgements and the completion are one transaction. If the process dies before it, the next
        attempt asks the model again; nothing counts twice.
        """
        subject = await self._database.read(lambda connection: self._find(connection, job))
        if isinstance(subject, Skipped):
            return {"skipped": subject.reason}
        if isinstance(subject, NotYet):
            raise JobPostponed(subject.reason, seconds=subject.seconds)
        await postpone_over_budget(self._database, subject, now=self._clock())
        judged = await KINDS[subject.judge.kind].judge(self._tools, subject)
        if judged.failure is not None:
            await self._record_failure(subject, judged, judged.failure)
            raise judged.failure
        try:
            recorded = await job.complete(
                lambda connection: record(connection, subject, judged, self._clock()), result=_result(subject, judged)
            )
        except SessionsErased:
            # The transaction did not complete the job either, so the runner does, with this result.
            return {"skipped": "the session was erased while the judge was asked"}
        if recorded.changed:
            self._signals.trajectories.notify()
        for count, effect in ((recorded.late, "recorded_after_training"), (recorded.on_time, "recorded")):
            if count:
                self._observer.rewards_recorded(count, effect=effect)
        count_judgement(self._observer, "scored" if recorded.reward_ids else "abstained", judged.usage)
        return None

    def _find(self, connection: Connection, job: RunningJob) -> Subject | Skipped | NotYet:
        """Return what the job is about, without the candidates that this judge has already judged."""
        reader = open_reader(connection, task_of(job), self._prompts, now=self._clock())
        if isinstance(reader, Skipped):
            return reader
        subject = KINDS[reader.judge.kind].find(reader)
        if not isinstance(subject, Subject):
            return subject
        repository = JudgementRepository(connection)
        missing = tuple(
            candidate
            for candidate in subject.candidates
            if not repository.is_judged(candidate.session_id, subject.name, subject.fingerprint, candidate.digest)
        )
        # Candidates that are shown together are judged together: all of their digests are new, or none is.
        return msgspec.structs.replace(subject, candidates=missing) if missing else Skipped("judged already")

    async def _record_failure(self, subject: Subject, judged: Judged, failure: Exception) -> None:
        """Record what a failed attempt cost and why it failed."""
        if isinstance(failure, JobPostponed) and not judged.usage.completion_tokens:
            # Nothing was spent, and it may be repeated for days while a quota is used up.
            return
        now = self._clock()
        await self._database.commit(lambda connection: record_failure(connection, subject, judged, failure, now))
        count_judgement(self._observer, "failed", judged.usage)


def count_judgement(observer: JudgeObserver, outcome: str, usage: Usage) -> None:
    observer.session_judged(
        outcome=outcome, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
    )


def _result(subject: Subject, judged: Judged) -> Json:
    """Return the result that the job shows."""
    scored = [score.verdict.score for score in judged.scores if score.verdict is not None]
    result: Json = {"scores": scored[:20], "scored": len(scored)}
    problems = [score.problem for score in judged.scores if score.problem is not None]
    if problems:
        result |= {"without_score": len(problems), "because": problems[0]}
    return result | ({"left_out": subject.left_out} if subject.left_out else {})
