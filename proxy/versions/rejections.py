"""Takes bad versions of a run out of service: those whose files are damaged, and those that engines died of."""

from __future__ import annotations

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.database.unit_of_work import Database
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.versions.repository import VersionRepository

DEATHS_TO_REJECT = 2
"""One death may have had any cause, as when the machine was out of memory or somebody killed the engine."""
_ANOTHER_CAUSE_SECONDS = 600.0
"""Engines that go on dying so soon after a version was rejected for it die of something else: too little memory, a
broken driver. Without this bound they would take one good version after the other along."""

_LOG = logger(__name__)


class Rejections:
    """Rejected versions of one run. Everything is in the store, so that a restarted proxy knows it too."""

    def __init__(self, *, database: Database, signals: Signals, clock: Clock, run_id: RunId) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock
        self._run_id = run_id

    async def reject(self, version: int, reason: str) -> None:
        """Mark a version as rejected and make the newest good one the head, which the trainer continues from.

        What the version consumed stays consumed: its trajectories may be what made it bad.
        """
        now = self._clock()

        def reject(connection: Connection) -> int | None:
            repository = VersionRepository(connection)
            repository.run(self._run_id, lock=True)
            if not repository.reject(self._run_id, version, reason, now=now):
                return None
            head = repository.run(self._run_id).head_version
            data = {"version": version, "reason": reason, "head": head}
            append_event(connection, run_id=self._run_id, kind="version.rejected", data=data, now=now)
            return int(head)

        head = await self._database.commit(reject)
        if head is None:  # another proxy rejected it first
            return
        _LOG.error("version rejected", version=version, head=head, reason=reason)
        self._signals.versions.notify()
        self._signals.events.notify()

    async def engine_died(self, version: int, *, deaths_before: int) -> None:
        """Count an engine that stopped while it loaded a version or soon after; reject the version if it is not the
        first, unless another was rejected for the same a short while ago.

        `deaths_before` is the version's count when the engine was given it. Several proxies may watch one engine: the
        first that sees its death counts it, and for the others the count is no longer the one they know.
        """
        deaths = await self._count(version, deaths_before)
        _LOG.warning("the engine stopped after it was given a version", version=version, times=deaths)
        if deaths < DEATHS_TO_REJECT:
            return
        other = await self._lately_rejected()
        if other is not None:
            _LOG.error(
                "the engine goes on stopping after a version was rejected for it: look for the cause in its log",
                version=version,
                rejected=other,
            )
            return
        await self.reject(version, f"the engine stopped {deaths} times while it loaded this version or soon after")

    async def engine_survived(self, version: int) -> None:
        """Forget earlier deaths: they had other causes."""
        await self._database.commit(
            lambda connection: VersionRepository(connection).forget_deaths(self._run_id, version)
        )

    async def _lately_rejected(self) -> int | None:
        since = self._clock() - _ANOTHER_CAUSE_SECONDS
        return await self._database.read(
            lambda connection: VersionRepository(connection).rejected_for_deaths(
                self._run_id, since=since, deaths=DEATHS_TO_REJECT
            )
        )

    async def _count(self, version: int, deaths_before: int) -> int:
        return await self._database.commit(
            lambda connection: VersionRepository(connection).count_death(self._run_id, version, before=deaths_before)
        )
