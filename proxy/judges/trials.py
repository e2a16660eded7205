"""Trials of a judge: its scores are shown and not recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, NotFound
from proxy.jobs.kinds import JobFailure, JobPostponed
from proxy.judges.kinds import KINDS
from proxy.judges.kinds.verifier import secret_owner
from proxy.judges.prompts import Prompts
from proxy.judges.reader import JudgingTask, open_reader
from proxy.judges.subjects import Judged, NotYet, Skipped, Subject
from proxy.judges.tools import Tools
from proxy.judges.views import Trial, TrialScore
from proxy.outbound.secrets import SigningSecrets
from proxy.runs.service import RunView
from proxy.settings import JudgeKind

MOST_TRIED = 20
"""Sessions of one trial; the request waits for the judge's model."""
_COMPARING = (JudgeKind.RELATIVE, JudgeKind.PAIRWISE)


class JudgeTrials:
    """Tries judges out, and shows the secrets by which verifiers recognise them."""

    def __init__(
        self, database: Database, tools: Tools, prompts: Prompts, secrets: SigningSecrets, clock: Clock
    ) -> None:
        self._database = database
        self._tools = tools
        self._prompts = prompts
        self._secrets = secrets
        self._clock = clock

    async def try_(self, run: RunView, name: str, session_ids: Sequence[str]) -> Trial:
        """Return what the judge says about ended or open sessions of the run; kinds that compare take them as one
        group. Nothing is recorded. Raise NotFound for an unknown judge."""
        judge = run.settings.judges.get(name)
        if judge is None:
            raise _unknown(run, name)
        together = judge.kind in _COMPARING
        if together and len(session_ids) < 2:
            raise InvalidRequest(f"a judge of the kind {judge.kind} compares sessions: name two or more")
        tasks = [
            JudgingTask(
                run_id=run.id,
                judge=name,
                session_id=session_id,
                together=tuple(session_ids) if together else (),
            )
            for session_id in (session_ids[:1] if together else session_ids)
        ]
        found = await asyncio.gather(*map(self._try, tasks))
        judged = [each for _, _, each in found if each is not None]
        costs = [each.usage.cost for each in judged]
        return Trial(
            scores=[score for scores, _, _ in found for score in scores],
            problems=[problem for _, problem, _ in found if problem is not None],
            prompt_tokens=sum(each.usage.prompt_tokens for each in judged),
            completion_tokens=sum(each.usage.completion_tokens for each in judged),
            cost=sum(cost for cost in costs if cost is not None) if costs and None not in costs else None,
        )

    def secret(self, run: RunView, name: str) -> str:
        """Return the secret that signs the requests of a verifier. Raise NotFound for an unknown judge."""
        judge = run.settings.judges.get(name)
        if judge is None:
            raise _unknown(run, name)
        if judge.kind is not JudgeKind.VERIFIER:
            raise InvalidRequest(f"the judge {name!r} is no verifier, so nothing of it is signed", param="judge")
        return self._secrets.text(secret_owner(run.id, name), 1)

    async def _try(self, task: JudgingTask) -> tuple[list[TrialScore], str | None, Judged | None]:
        """Return the scores of one task, or why there are none."""
        try:
            subject = await self._database.read(lambda connection: self._find(connection, task))
            if not isinstance(subject, Subject):
                return [], f"{task.session_id}: {subject.reason}", None
            judged = await KINDS[subject.judge.kind].judge(self._tools, subject)
        except (JobFailure, JobPostponed) as failure:
            return [], f"{task.session_id}: {failure}", None
        if judged.failure is not None:
            return [], f"{task.session_id}: {judged.failure}", judged
        return _scores(subject, judged), None, judged

    def _find(self, connection: Connection, task: JudgingTask) -> Subject | Skipped | NotYet:
        reader = open_reader(connection, task, self._prompts, now=self._clock())
        if isinstance(reader, Skipped):
            return reader
        return KINDS[reader.judge.kind].find(reader)


def _scores(subject: Subject, judged: Judged) -> list[TrialScore]:
    found = []
    for score in judged.scores:
        candidate, verdict = subject.candidates[score.candidate], score.verdict
        found.append(
            TrialScore(
                session_id=candidate.session_id,
                turn_id=score.turn_id or candidate.turn_id,
                reward=score.reward or subject.judge.reward or subject.name,
                score=None if verdict is None else verdict.score,
                spread=None if verdict is None else verdict.spread,
                votes=list(score.votes),
                rationale=score.problem if verdict is None else verdict.rationale,
                is_cut=candidate.is_cut,
            )
        )
    return found


def _unknown(run: RunView, name: str) -> NotFound:
    known = ", ".join(run.settings.judges) or "none"
    return NotFound(f"the run {run.name!r} has no judge {name!r}; it has: {known}", param="judge")
