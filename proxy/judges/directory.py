"""The judges of a run with what they have done, and the judging of sessions that ended before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, NotFound
from proxy.jobs.kinds import JobRefused
from proxy.judges.agreement import Agreement, agreement_of
from proxy.judges.prompts import Prompts, fingerprint
from proxy.judges.recording import SOURCE
from proxy.judges.repository import JudgementRepository
from proxy.judges.views import JudgeView, Rejudging
from proxy.lifecycle.drift import WINDOW, drift_of
from proxy.lifecycle.judging import enqueue_judging
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunView
from proxy.settings import JudgeSettings

# Sessions of one request, which is to be answered within seconds.
MOST_SESSIONS = 500
# Jobs that one transaction enqueues: the turns of agents' calls wait for it.
_AT_ONCE = 25
# Scores that an agreement is computed from, the newest ones.
MOST_COMPARED = 2000
MOST_SOURCES = 40
# With the sources of judges, of which a run has had more than it has now.
_MOST_LOOKS = 2 * MOST_SOURCES


class JudgeDirectory:
    def __init__(self, database: Database, prompts: Prompts, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._prompts = prompts
        self._signals = signals
        self._clock = clock

    async def list_(self, run: RunView) -> list[JudgeView]:
        """Return the judges of the run's settings, in their order."""

        def read(connection: Connection) -> list[JudgeView]:
            repository = JudgementRepository(connection)
            totals = repository.totals(run.id)
            return [
                self._view(run.id, name, judge, repository, totals.get(name, {}))
                for name, judge in run.settings.judges.items()
            ]

        return await self._database.read(read)

    async def agreement(self, run: RunView, name: str, source: str) -> Agreement:
        """Return how far the newest scores of the judge, in its present form, agree with the rewards of `source`.
        Raise NotFound for an unknown judge."""
        judge, form = self._form(run, name)
        pairs = await self._database.read(
            lambda connection: JudgementRepository(connection).pairs(run.id, name, source, form, limit=MOST_COMPARED)
        )
        return agreement_of(pairs, low=judge.low, high=judge.high)

    async def sources(self, run: RunView) -> list[str]:
        """Return the sources of the run's rewards except for judges, the first MOST_SOURCES in their order."""

        def read(connection: Connection) -> list[str]:
            repository, found, last = JudgementRepository(connection), list[str](), ""
            # One look into the index for each source, because a run may have millions of rewards.
            for _ in range(_MOST_LOOKS):
                source = repository.next_source(run.id, last)
                if source is None or len(found) == MOST_SOURCES:
                    break
                last = source
                if not source.startswith(SOURCE):
                    found.append(source)
            return found

        return await self._database.read(read)

    async def unscored(self, run: RunView, name: str) -> int:
        """Return how many sessions `rejudge` would let the judge score, at most MOST_SESSIONS. Raise NotFound for an
        unknown judge."""
        _, form = self._form(run, name)
        found = await self._database.read(
            lambda connection: JudgementRepository(connection).unscored(
                run.id, name, form, session_ids=None, limit=MOST_SESSIONS
            )
        )
        return len(found)

    def _form(self, run: RunView, name: str) -> tuple[JudgeSettings, str]:
        """Return a judge of the run with its fingerprint. Raise NotFound, and InvalidRequest if its prompt cannot be
        read."""
        judge = run.settings.judges.get(name)
        if judge is None:
            known = ", ".join(run.settings.judges) or "none"
            raise NotFound(f"the run {run.name!r} has no judge {name!r}; it has: {known}", param="judge")
        try:
            return judge, fingerprint(judge, self._prompts.source(judge))
        except JobRefused as refusal:
            raise InvalidRequest(str(refusal), param="judge") from refusal

    def _view(
        self,
        run_id: str,
        name: str,
        judge: JudgeSettings,
        repository: JudgementRepository,
        totals: dict[str, Any],
    ) -> JudgeView:
        problem, drift = repository.newest_error(run_id, name), None
        try:
            form = fingerprint(judge, self._prompts.source(judge))
            drift = drift_of(repository.scores(run_id, name, form, limit=2 * WINDOW))
        except JobRefused as refusal:
            form, problem = None, str(refusal)
        return JudgeView(
            name=name,
            kind=judge.kind,
            model=judge.model or judge.url or judge.function,
            reward=judge.reward or name,
            votes=judge.votes,
            fingerprint=form,
            problem=problem,
            drift=drift,
            **totals,
        )

    async def rejudge(self, run: RunView, name: str, session_ids: Sequence[str] | None) -> Rejudging:
        """Enqueue the judging of ended sessions that the judge has not scored in its present form: of the given ones,
        or of all, the newest first, up to MOST_SESSIONS. Those whose judging is dead or cancelled are tried again.
        Raise NotFound for an unknown judge."""
        _, form = self._form(run, name)
        now = self._clock()
        found = await self._database.read(
            lambda connection: JudgementRepository(connection).unscored(
                run.id, name, form, session_ids=session_ids, limit=MOST_SESSIONS
            )
        )

        def write(some: Sequence[str], connection: Connection) -> int:
            # Keyed by the form, so that a repeated request enqueues nothing twice.
            return sum(enqueue_judging(connection, run.id, [name], one, now=now, again=form) for one in some)

        enqueued = 0
        for start in range(0, len(found), _AT_ONCE):
            enqueued += await self._database.commit(partial(write, found[start : start + _AT_ONCE]))
        self._signals.jobs.notify()
        return Rejudging(enqueued=enqueued, more=len(found) == MOST_SESSIONS)
