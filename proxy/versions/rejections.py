"""Take bad versions of a run out of service: versions with damaged files, and versions that engines die of."""

from __future__ import annotations

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.database.unit_of_work import Database
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.versions.repository import VersionRepository
from proxy.versions.withdrawal_repository import WithdrawalRepository

DEATHS_TO_REJECT = 2
"""More than one, because a single death may have any cause: no memory left, or somebody killed the engine."""
# If engines still die so soon after a version was rejected for their deaths, the cause is another one: too little
# memory, a broken driver. Without this bound, one good version after the other would be rejected.
_ANOTHER_CAUSE_SECONDS = 600.0

_LOG = logger(__name__)


class Rejections:
    """Rejects versions of one run. All its state is in the store, so a restarted proxy continues with it."""

    def __init__(self, *, database: Database, signals: Signals, clock: Clock, run_id: RunId) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock
        self._run_id = run_id

    async def reject(self, version: int, reason: str) -> None:
        """Mark a version as rejected and make the newest good one the head, from which the trainer continues.

        The trajectories that the version consumed stay consumed, because they may be what made it bad.
        """
        now = self._clock()

        def reject(connection: Connection) -> int | None:
            versions = VersionRepository(connection)
            versions.run(self._run_id, lock=True)
            if not WithdrawalRepository(connection).reject(self._run_id, version, reason, now=now):
                return None
            head = versions.run(self._run_id).head_version
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
        """Count an engine that stopped while it loaded a version or soon after, and reject the version at the second
        death, unless another version was rejected for deaths a short while ago.

        `deaths_before` is the version's count when the engine was given the version. Several proxies may watch one
        engine: the first to see its death counts it, and the others find that the count has changed already.
        """
        deaths = await self._count(version, deaths_before)
        _LOG.warning("the engine stopped after it was given a version", version=version, times=deaths)
        if deaths < DEATHS_TO_REJECT:
            return
        other = await self._recently_rejected()
        if other is not None:
            _LOG.error(
                "the engine still stops after a version was rejected for that: its log may say why",
                version=version,
                rejected=other,
            )
            return
        await self.reject(version, f"the engine stopped {deaths} times while it loaded this version or soon after")

    async def engine_survived(self, version: int) -> None:
        """Clear the version's deaths: an engine has lived with it, so they had other causes."""
        await self._database.commit(
            lambda connection: WithdrawalRepository(connection).forget_deaths(self._run_id, version)
        )

    async def _recently_rejected(self) -> int | None:
        since = self._clock() - _ANOTHER_CAUSE_SECONDS
        return await self._database.read(
            lambda connection: WithdrawalRepository(connection).rejected_for_deaths(
                self._run_id, since=since, deaths=DEATHS_TO_REJECT
            )
        )

    async def _count(self, version: int, deaths_before: int) -> int:
        return await self._database.commit(
            lambda connection: WithdrawalRepository(connection).count_death(
                self._run_id, version, before=deaths_before
            )
        )
