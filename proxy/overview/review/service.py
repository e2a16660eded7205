"""The review queue of a run: sessions that people should look at."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.overview.review.queue import Observed, Queued, queue_of
from proxy.overview.review.repository import ReviewRepository

REVIEWERS = "reviewer:"
"""The beginning of the source of what people say on the page."""

_RECENT = 200
"""Number of a run's last ended sessions among which the queue is made."""
_LONGEST = 50
_OTHERS = 10


class ReviewQueue:
    """Reads the queue. Nothing of it is stored: what is worth a look changes with every session."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def queue(self, run_id: str) -> list[Queued]:
        """Return up to 50 of the run's last 200 ended sessions for which there is a reason to look and which nobody
        has reviewed."""

        def read(connection: Connection) -> list[Observed]:
            repository = ReviewRepository(connection)
            rows = repository.unreviewed(run_id, REVIEWERS, _RECENT)
            ids = [row.id for row in rows]
            spreads, logprobs = repository.spreads(ids), repository.logprobs(ids)
            return [
                Observed(
                    id=row.id,
                    task=row.task,
                    reward=row.reward,
                    ended_at=row.ended_at,
                    judge=spreads[row.id][0] if row.id in spreads else None,
                    spread=spreads[row.id][1] if row.id in spreads else 0.0,
                    mean_logprob=logprobs.get(row.id),
                )
                for row in rows
            ]

        return queue_of(await self._database.read(read), _LONGEST)

    async def others(self, session_id: str) -> Sequence[AnyRow]:
        """Return up to 10 sessions that a session may be compared with: `id`, `task`, `reward`, `ended_at`."""
        return await self._database.read(lambda connection: ReviewRepository(connection).others(session_id, _OTHERS))
