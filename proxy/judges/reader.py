"""Reads what a judging job is about, within one read transaction."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection

from proxy.contract.turn import TurnState
from proxy.jobs.kinds import RunningJob
from proxy.judges.groups import Standing, standing_of
from proxy.judges.prompts import Prompts, fingerprint
from proxy.judges.repository import JudgementRepository
from proxy.judges.subjects import Candidate, NotYet, Skipped, Subject
from proxy.judges.transcripts import Transcript
from proxy.lifecycle.judging import GIVEN_UP
from proxy.settings import JudgeSettings, RunSettings
from proxy.transfer.reading import TransferReader
from proxy.transfer.records import SessionRecord, TurnRecord


class SubjectReader:
    """The job's judge and the sessions that it names. Build it with `open_reader`."""

    def __init__(
        self,
        connection: Connection,
        task: JudgingTask,
        *,
        run_name: str,
        settings: RunSettings,
        judge: JudgeSettings,
        prompts: Prompts,
        now: float,
    ) -> None:
        self._connection = connection
        self._task = task
        self._settings = settings
        self._run_name = run_name
        self._source = prompts.source(judge)
        self._now = now
        self.judge = judge

    @property
    def turn_ids(self) -> tuple[str, ...]:
        """The turns whose answers are to be compared; empty if sessions are."""
        return self._task.turn_ids

    def session(self) -> SessionRecord | Skipped:
        """Return the job's session, unless it was erased, deleted or given up."""
        record = self.records([self._task.session_id]).get(self._task.session_id)
        if record is None or record.run != self._run_name:
            return Skipped("the session was erased, or the run has no such session")
        if record.outcome in GIVEN_UP:
            return Skipped(f"the session's outcome is {record.outcome}")
        return record

    def records(self, session_ids: Sequence[str]) -> dict[str, SessionRecord]:
        """Return those of the sessions that are not erased, by id."""
        return TransferReader(self._connection).named(session_ids, rules=self._settings.reward_rules)

    def group(self) -> tuple[SessionRecord, ...] | Skipped | NotYet:
        """Return the sessions of the job's group, in the order of their ends, once they are to be judged."""
        if self._task.together:
            return self._compared(self._task.together)
        members = JudgementRepository(self._connection).group_of(self._task.session_id)
        if not members:
            return Skipped("the session belongs to no group, so there is nothing to compare it with")
        standing = standing_of(members, timeout=self._settings.group_timeout_seconds, now=self._now)
        if not isinstance(standing, Standing):
            return standing
        if wait := self._wait_for_others(standing):
            return wait
        return self._compared(standing.session_ids)

    def subject(
        self, candidates: Sequence[Candidate], *, context: Transcript | None = None, left_out: int = 0
    ) -> Subject:
        return Subject(
            run_id=self._task.run_id,
            run_name=self._run_name,
            name=self._task.judge,
            judge=self.judge,
            fingerprint=fingerprint(self.judge, self._source),
            prompt=self._source,
            candidates=tuple(candidates),
            context=context,
            left_out=left_out,
        )

    def _compared(self, session_ids: Sequence[str]) -> tuple[SessionRecord, ...] | Skipped:
        found = self.records(session_ids)
        records = tuple(found[one] for one in session_ids if one in found and found[one].run == self._run_name)
        return records if len(records) > 1 else Skipped("fewer than two of the sessions can be judged")

    def _wait_for_others(self, standing: Standing) -> NotYet | None:
        """Return why another job is to judge the group first.

        Each member's end has a job, and any of them judges the whole group. The one of the last member goes first;
        the others then find the scores, instead of asking the model at the same time.
        """
        first = JudgementRepository(self._connection).first_job(
            self._task.judge, standing.session_ids, mark=self._task.mark
        )
        if first is None or first == self._task.session_id:
            return None
        return NotYet(f"the job of the session {first} judges the group", _FOLLOWER_SECONDS)


class JudgingTask(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of a judging job. `mark` distinguishes a later judging."""

    run_id: str
    judge: str
    session_id: str
    turn_ids: tuple[str, ...] = ()
    mark: str = ""
    together: tuple[str, ...] = ()
    """Sessions to compare with each other, in a trial; empty: the group of the session."""


def open_reader(
    connection: Connection, task: JudgingTask, prompts: Prompts, *, now: float
) -> SubjectReader | Skipped:
    """Return the reader of a job, unless its run or its judge is gone. Raise JobRefused if the judge's prompt cannot
    be read."""
    run = JudgementRepository(connection).run(task.run_id)
    if run is None:
        return Skipped("the run was deleted")
    settings = RunSettings.model_validate(run.config)
    judge = settings.judges.get(task.judge)
    if judge is None:
        return Skipped(f"the run has no judge {task.judge!r} any more")
    return SubjectReader(
        connection, task, run_name=run.name, settings=settings, judge=judge, prompts=prompts, now=now
    )


def task_of(job: RunningJob) -> JudgingTask:
    session_id, judge = str(job.payload["session_id"]), str(job.payload["judge"])
    return JudgingTask(
        run_id=job.run_id or "",
        judge=judge,
        session_id=session_id,
        turn_ids=tuple(map(str, job.payload.get("turns", ()))),
        mark=job.key.removeprefix(f"{judge}:{session_id}"),
    )


def answered(turns: Sequence[TurnRecord]) -> bool:
    """Return whether there is an answer of the agent to judge."""
    return any(turn.state is not TurnState.FAILED for turn in turns)


# How soon a job looks again for the scores of its group.
_FOLLOWER_SECONDS = 20.0
