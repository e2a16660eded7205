"""Changes of a run's versions by people: pin the version that engines serve, go back to an earlier one, reject one.

Each change is one transaction with an event that has its reason. Afterwards the engines' controllers load the version
that is now wanted, and a trainer whose version was withdrawn has its next commit refused and continues from the head.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.policy import VersionState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, NotFound
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.runs.service import RunView
from proxy.versions.numbers import ranges
from proxy.versions.release import Change, pass_version
from proxy.versions.repository import VersionRepository, wanted_version
from proxy.versions.withdrawal_repository import WithdrawalRepository

_LOG = logger(__name__)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of a run that matter now.

    The trainer continues from `head`. Engines should serve `wanted`: `pinned`, or if it is None `promoted`, the
    newest version that passed its gates, or the head without gates. They were last seen to serve `serving`.
    `rolled_back` are the versions that a rollback has just taken back.
    """

    run: str
    head: int
    serving: int
    wanted: int
    pinned: int | None
    promoted: int | None
    rolled_back: tuple[int, ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for a change, and the id of the key that asked for it."""

    reason: str
    by: str


class VersionSteering:
    """Changes of the served version and of the head by people, for all runs."""

    def __init__(self, *, database: Database, clock: Clock, signals: Signals) -> None:
        self._database = database
        self._clock = clock
        self._signals = signals

    async def standing(self, run: RunView) -> Standing:
        """Return the run's head, served and pinned version."""
        return await self._database.read(lambda connection: _standing(VersionRepository(connection), run))

    async def pin(self, run: RunView, version: int, decision: Decision) -> Standing:
        """Make the engines serve this version until the run is unpinned. Training goes on from the head, as far as
        its bound on staleness allows with trajectories of the pinned version.

        Raise NotFound for an unknown version, Conflict for one that cannot be served.
        """

        def change(versions: VersionRepository, changes: WithdrawalRepository) -> Change:
            require_servable(versions, run, version)
            changes.pin(run.id, version)
            return Change("version.pinned", {"version": version})

        return await self._change(run, decision, change)

    async def promote(self, run: RunView, version: int, decision: Decision) -> Standing:
        """Let a version serve that waits for its gates or for somebody to promote it, whatever the gates say.

        Raise NotFound for an unknown version, Conflict for one that does not wait or cannot be served.
        """

        def change(versions: VersionRepository, changes: WithdrawalRepository) -> Change:
            require_servable(versions, run, version)
            return pass_version(versions, run, version)

        return await self._change(run, decision, change)

    async def unpin(self, run: RunView, decision: Decision) -> Standing:
        """Make the engines serve the newest version that may serve again. Raise Conflict if the run is not pinned."""

        def change(versions: VersionRepository, changes: WithdrawalRepository) -> Change:
            pinned = versions.run(run.id).pinned_version
            if pinned is None:
                raise Conflict(f"the run {run.name!r} is not pinned")
            changes.pin(run.id, None)
            return Change("version.unpinned", {"version": pinned})

        return await self._change(run, decision, change)

    async def reject(self, run: RunView, version: int, decision: Decision) -> Standing:
        """Take a version out of service for good; the newest good one becomes the head.

        The trajectories that the version consumed stay consumed, because they may be what made it bad. Raise NotFound
        for an unknown version, Conflict for version 0 and for one that was rejected before.
        """

        def change(versions: VersionRepository, changes: WithdrawalRepository) -> Change:
            _existing(versions, run, version)
            if version == 0:
                raise Conflict("version 0 is what the run began from, so it cannot be rejected", param="version")
            if not changes.reject(run.id, version, decision.reason, now=self._clock()):
                raise Conflict(f"version {version} was rejected before", param="version")
            return Change("version.rejected", {"version": version, "head": versions.run(run.id).head_version})

        return await self._change(run, decision, change)

    async def roll_back(
        self, run: RunView, to: int | None, decision: Decision, *, leave_out_sessions: bool
    ) -> Standing:
        """Go back to version `to`, by default the parent of the version that serves. The versions after it are marked
        as rolled back; it becomes the head, from which the trainer continues, and engines serve it unless the run is
        pinned to an older one.

        With `leave_out_sessions`, untrained sessions that the later versions answered are left out of training. Raise
        NotFound for an unknown version, Conflict if no good version comes after it or it cannot be served.
        """

        def change(versions: VersionRepository, changes: WithdrawalRepository) -> Change:
            target = _parent_of_serving(versions, run) if to is None else to
            require_servable(versions, run, target)
            now = self._clock()
            rolled_back = changes.roll_back(run.id, target, decision.reason, now=now)
            if not rolled_back:
                raise Conflict(f"version {target} is the newest good one: there is nothing to roll back", param="to")
            sessions = changes.hold_back(run.id, rolled_back, now=now) if leave_out_sessions else 0
            data = {"to": target, "versions": rolled_back, "sessions_left_out": sessions}
            return Change("version.rolled_back", data, rolled_back)

        return await self._change(run, decision, change)

    async def _change(
        self, run: RunView, decision: Decision, change: Callable[[VersionRepository, WithdrawalRepository], Change]
    ) -> Standing:
        """Make a change and append its event in one transaction, and wake the engines' controllers."""

        def write(connection: Connection) -> Standing:
            repository = VersionRepository(connection)
            repository.run(run.id, lock=True)  # so that no commit moves the head meanwhile
            made = change(repository, WithdrawalRepository(connection))
            data = {**made.data, "reason": decision.reason, "by": decision.by}
            append_event(connection, run_id=run.id, kind=made.event, data=data, now=self._clock())
            return msgspec.structs.replace(_standing(repository, run), rolled_back=tuple(made.rolled_back))

        standing = await self._database.commit(write)
        _LOG.warning("versions changed by hand", run=run.name, head=standing.head, pinned=standing.pinned)
        self._signals.versions.notify()
        self._signals.events.notify()
        return standing


def _standing(repository: VersionRepository, run: RunView) -> Standing:
    row = repository.run(run.id)
    return Standing(
        run=run.name,
        head=row.head_version,
        serving=row.serving_version,
        wanted=wanted_version(row),
        pinned=row.pinned_version,
        promoted=row.promoted_version,
    )


def _existing(repository: VersionRepository, run: RunView, version: int) -> AnyRow:
    """Return a version's row. Raise NotFound if the run has no such version."""
    row = repository.find(run.id, version)
    if row is None:
        newest = repository.newest(run.id)
        raise NotFound(f"the run {run.name!r} has no version {version}; it has 0 to {newest}", param="version")
    return row


def require_servable(repository: VersionRepository, run: RunView, version: int) -> None:
    """Raise NotFound for an unknown version, and Conflict for one that was withdrawn or whose weights are gone."""
    row = _existing(repository, run, version)
    if row.state in (VersionState.REJECTED, VersionState.ROLLED_BACK):
        what = "rejected" if row.state == VersionState.REJECTED else "rolled back"
        raise Conflict(f"version {version} was {what}: {row.rejected_because}", param="version")
    if row.weights_removed_at is not None:
        good = repository.servable_versions(run.id)
        raise Conflict(
            f"the weights of version {version} were deleted to save space (trainer.keep_versions); there are those of"
            f" {ranges(good)}",
            param="version",
        )


def _parent_of_serving(repository: VersionRepository, run: RunView) -> int:
    serving = repository.version(run.id, repository.run(run.id).serving_version)
    if serving.parent_version is None:
        raise Conflict("version 0 serves, and no version is before it", param="to")
    return int(serving.parent_version)
