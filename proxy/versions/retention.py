"""Decide which versions' weights are no longer needed, so that trainers can delete them.

The proxy marks weights as removed before the trainer, who owns the directory, deletes them. The trainer sends the
weights on its disk and gets back those that are marked, also those marked earlier. So a trainer that dies between the
two steps finishes the work at its next version.
"""

from __future__ import annotations

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.policy import PruneReply, PruneRequest
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunView
from proxy.versions.release import in_use
from proxy.versions.repository import VersionRepository

MAX_PRESENT = 10_000
"""Weights in one request: far more than a disk holds, few enough for one transaction."""


class WeightRetention:
    """Retention of weights, for all runs."""

    def __init__(self, *, database: Database, clock: Clock, signals: Signals) -> None:
        self._database = database
        self._clock = clock
        self._signals = signals

    async def prune(self, run: RunView, request: PruneRequest) -> PruneReply:
        """Mark the present versions older than the newest `keep`, and return all present ones that are marked.

        The head, the serving, pinned and promoted version, version 0, every `keep_every`-th version, versions from
        which other runs begin, that wait for their gates or that sessions are held on are never marked, and a mark is
        never removed. Raises InvalidRequest.
        """
        if request.keep < 1:
            raise InvalidRequest(f"keep is 1 or more, not {request.keep}", param="keep")
        every = request.keep_every
        if every is not None and every < 1:
            raise InvalidRequest(f"keep_every is 1 or more, not {every}", param="keep_every")
        if len(request.present) > MAX_PRESENT:
            raise InvalidRequest(f"present names at most {MAX_PRESENT} weights at once", param="present")
        now = self._clock()

        def mark(connection: Connection) -> tuple[list[int], tuple[str, ...]]:
            repository = VersionRepository(connection)
            row = repository.run(run.id, lock=True)
            newest_to_remove = row.head_version - request.keep
            uris = dict(repository.weights_at(run.id, request.present))
            # A version 0 with weights has those of another run, whose trainer alone removes them.
            needed = {
                0,
                row.head_version,
                row.serving_version,
                row.pinned_version,
                row.promoted_version,
                *repository.begun_from(run.id),
                *in_use(connection, run.id),
            }
            if every is not None:
                needed |= {version for version in uris.values() if version % every == 0}
            old = [version for version in uris.values() if version <= newest_to_remove and version not in needed]
            marked = repository.mark_removed(run.id, old, now=now)
            if marked:
                data = {"versions": sorted(marked), "keep": request.keep}
                append_event(connection, run_id=run.id, kind="weights.removed", data=data, now=now)
            removed = repository.removed(run.id, list(uris.values()))
            return marked, tuple(uri for uri, version in uris.items() if version in removed)

        marked, remove = await self._database.commit(mark)
        if marked:
            self._signals.events.notify()
        return PruneReply(remove=remove)
