"""The judges of a run with what they have done, and the judging of sessions that ended before."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.errors import NotFound
from proxy.judges.fingerprints import fingerprint
from proxy.judges.repository import JudgementRepository
from proxy.judges.views import JudgeView, Rejudging
from proxy.lifecycle.judging import enqueue_judging
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunView

# Sessions of one request: other writes wait for its transaction.
MOST_SESSIONS = 500


class JudgeDirectory:
    def __init__(self, database: Database, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock

    async def list_(self, run: RunView) -> list[JudgeView]:
        """Return the judges of the run's settings, in their order."""

        def read(connection: Connection) -> list[JudgeView]:
            repository = JudgementRepository(connection)
            totals = repository.totals(run.id)
            return [
                JudgeView(
                    name=name,
                    kind=judge.kind,
                    model=judge.model,
                    reward=judge.reward or name,
                    votes=judge.votes,
                    fingerprint=fingerprint(judge),
                    problem=repository.newest_error(run.id, name),
                    **totals.get(name, {}),
                )
                for name, judge in run.settings.judges.items()
            ]

        return await self._database.read(read)

    async def rejudge(self, run: RunView, name: str, session_ids: Sequence[str] | None) -> Rejudging:
        """Enqueue the judging of ended sessions that the judge has not scored in its present form: of the given ones,
        or of all, the newest first, up to MOST_SESSIONS. Raise NotFound for an unknown judge."""
        judge = run.settings.judges.get(name)
        if judge is None:
            known = ", ".join(run.settings.judges) or "none"
            raise NotFound(f"the run {run.name!r} has no judge {name!r}; it has: {known}", param="judge")
        form = fingerprint(judge)
        now = self._clock()

        def write(connection: Connection) -> Rejudging:
            found = JudgementRepository(connection).unscored(
                run.id, name, form, session_ids=session_ids, limit=MOST_SESSIONS
            )
            # Keyed by the form, so that a repeated request enqueues nothing twice.
            enqueued = sum(
                enqueue_judging(connection, run.id, [name], session_id, now=now, again=form) for session_id in found
            )
            return Rejudging(enqueued=enqueued, more=len(found) == MOST_SESSIONS)

        result = await self._database.commit(write)
        self._signals.jobs.notify()
        return result
