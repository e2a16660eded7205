"""Hands trajectories to trainers: each is in at most one live claim, and returns when the claim's lease passes.

What is waited for: enough ready sessions in whole groups. `signals.trajectories` wakes a waiting claim when a
session becomes ready; the passing of time (group time-outs, leases) and other processes are seen once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from proxy.clock import Clock
from proxy.contract.claim import ClaimedBatch, ClaimRequest, LeaseReply
from proxy.contract.identifiers import ClaimId, GroupId, SessionId, new_claim_id
from proxy.contract.trajectory import Trajectory, TrajectoryGroup
from proxy.contract.turn import Turn
from proxy.database.events import append_event
from proxy.database.signals import Signals
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, InvalidRequest
from proxy.runs.service import RunView
from proxy.trajectories.assembly import BrokenTree, assemble
from proxy.trajectories.claims.repository import ClaimRepository, ClaimState, RunStanding
from proxy.trajectories.claims.rewards import HandedRewards, handed_rewards
from proxy.trajectories.claims.selection import Bounds, Candidate, Selection, select_units
from proxy.trajectories.repository import TurnRepository

MAX_WAIT_SECONDS = 60.0
MAX_WANT = 8192
_RECHECK_SECONDS = 1.0
_PAGE = 512
_EXPIRED_AT_ONCE = 16

Abandoned = Callable[[], Awaitable[bool]]


async def _never() -> bool:
    return False


class _Raced(Exception):
    """Another process took a selected session first."""


class _Lease:
    """A claim as committed, before its turns are read."""

    def __init__(
        self,
        reply: ClaimedBatch,
        units: list[tuple[Candidate, ...]],
        rewards: dict[str, HandedRewards],
    ) -> None:
        self.reply = reply
        self.units = units
        self.rewards = rewards


class ClaimService:
    """Claims of all runs. Clients' mistakes raise InvalidRequest, a claim that is not live raises Conflict."""

    def __init__(self, *, database: Database, clock: Clock, signals: Signals) -> None:
        self._database = database
        self._clock = clock
        self._signals = signals
        self._closed = False

    def close(self) -> None:
        """Ends all waiting; claims then answer with what is there."""
        self._closed = True
        self._signals.trajectories.notify()

    async def claim(self, run: RunView, request: ClaimRequest, *, abandoned: Abandoned = _never) -> ClaimedBatch:
        """Leases about `want` trajectories, waiting up to `wait_s` for them; an empty batch if there are too few.

        Nothing is leased once `abandoned` says that nobody waits for the answer any more.
        """
        _check(request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_s
        woken = False
        while True:
            seen = self._signals.trajectories.count
            remaining = 0.0 if self._closed else deadline - loop.time()
            minimum = request.want if remaining > 0 else request.at_least
            if not woken:
                await self.expire()
            if await abandoned():
                break
            batch = await self._attempt(run, request, minimum)
            if batch is not None:
                return batch
            if remaining <= 0:
                break
            woken = await self._signals.trajectories.wait(min(remaining, _RECHECK_SECONDS), since=seen)
        async with self._database.read() as connection:
            head = (await ClaimRepository(connection).run(run.id)).head_version
        return _batch(None, lease_expires_at=self._clock(), base_version=head)

    async def heartbeat(self, run: RunView, claim_id: ClaimId) -> LeaseReply:
        """Extends a live lease. Raises Conflict for one that has passed."""
        now = self._clock()
        expires_at = now + run.settings.lease_seconds
        async with self._database.write() as connection:
            repository = ClaimRepository(connection)
            known = await repository.state(claim_id, run.id)
            if known is None or known[0] is not ClaimState.LEASED or known[1] <= now:
                raise _gone(claim_id, known)
            await repository.extend(claim_id, expires_at)
        return LeaseReply(claim_id=claim_id, lease_expires_at=expires_at)

    async def release(self, run: RunView, claim_id: ClaimId) -> None:
        """Gives a claim's trajectories back at once. Released before: nothing changes. Raises Conflict otherwise."""
        now = self._clock()
        async with self._database.write() as connection:
            repository = ClaimRepository(connection)
            known = await repository.state(claim_id, run.id)
            if known is not None and known[0] is ClaimState.RELEASED:
                return
            if known is None or known[0] is not ClaimState.LEASED:
                raise _gone(claim_id, known)
            standing = await repository.run(run.id, lock=True)
            count = await repository.end(
                claim_id, ClaimState.RELEASED, reward_weights=standing.reward_weights, now=now
            )
            data = {"claim": claim_id, "sessions": count}
            await append_event(connection, run_id=run.id, kind="claim.released", data=data, now=now)
        self._changed()

    async def expire(self) -> int:
        """Returns the sessions of claims whose lease has passed, of all runs; how many claims there were."""
        total = 0
        while True:
            now = self._clock()
            async with self._database.read() as connection:
                if not await ClaimRepository(connection).overdue(now, 1):
                    break
            total += await self._expire_some(now)
        if total:
            self._changed()
        return total

    async def sweep(self) -> None:
        """For the background: what claims also do before they look."""
        await self.expire()

    async def _expire_some(self, now: float) -> int:
        async with self._database.write() as connection:
            repository = ClaimRepository(connection)
            overdue = await repository.overdue(now, _EXPIRED_AT_ONCE)
            for row in overdue:
                standing = await repository.run(row.run_id, lock=True)
                count = await repository.end(
                    row.id, ClaimState.EXPIRED, reward_weights=standing.reward_weights, now=now
                )
                data = {"claim": row.id, "sessions": count}
                await append_event(connection, run_id=row.run_id, kind="claim.expired", data=data, now=now)
        return len(overdue)

    async def _attempt(self, run: RunView, request: ClaimRequest, minimum: int) -> ClaimedBatch | None:
        """A claim of at least `minimum`, or None. Writes only if a look without a lock promises something."""
        async with self._database.read() as connection:
            repository = ClaimRepository(connection)
            standing = await repository.run(run.id)
            if not standing.is_active or await repository.ready_count(run.id, minimum) < minimum:
                return None
            selection = await self._select(repository, run, standing, request)
        if selection.count < minimum and not selection.stale:
            return None
        try:
            lease = await self._lease(run, request, minimum)
        except _Raced:
            return None
        return await self._hand_out(run, lease) if lease is not None else None

    async def _select(
        self, repository: ClaimRepository, run: RunView, standing: RunStanding, request: ClaimRequest
    ) -> Selection:
        bounds = Bounds(
            oldest_version=standing.head_version - request.max_staleness,
            group_timeout=run.settings.group_timeout_seconds,
            now=self._clock(),
        )
        selection = Selection()
        seen: set[str] = set()
        last: Candidate | None = None
        while selection.count < request.want:
            page = await repository.ready_page(run.id, last, _PAGE)
            named = {candidate.group_id: None for candidate in page if candidate.group_id is not None}
            groups = await repository.groups([group_id for group_id in named if group_id not in seen])
            select_units(page, groups, bounds, want=request.want, seen=seen, selection=selection)
            if len(page) < _PAGE:
                break
            last = page[-1]
        return selection

    async def _lease(self, run: RunView, request: ClaimRequest, minimum: int) -> _Lease | None:
        """Selects again under the lock, and leases what it finds; marks what has become stale in any case."""
        async with self._database.write() as connection:
            repository = ClaimRepository(connection)
            standing = await repository.run(run.id, lock=True)
            if not standing.is_active:
                return None
            selection = await self._select(repository, run, standing, request)
            now = self._clock()
            if selection.stale:
                stale = [candidate.id for candidate in selection.stale]
                await repository.mark_stale(stale)
                data = {"count": len(stale), "head": standing.head_version, "max_staleness": request.max_staleness}
                await append_event(connection, run_id=run.id, kind="sessions.stale", data=data, now=now)
            if selection.count < minimum:
                return None
            candidates = selection.candidates
            ledger = await repository.ledger([candidate.id for candidate in candidates])
            rewards = {
                session_id: handed_rewards(entries, standing.reward_weights) for session_id, entries in ledger.items()
            }
            claim_id = new_claim_id()
            expires_at = now + run.settings.lease_seconds
            await repository.insert_claim(
                claim_id,
                run.id,
                request,
                base_version=standing.head_version,
                now=now,
                lease_expires_at=expires_at,
            )
            if await repository.lease(claim_id, candidates, rewards) != len(candidates):
                raise _Raced
        reply = _batch(claim_id, lease_expires_at=expires_at, base_version=standing.head_version)
        return _Lease(reply, selection.units, rewards)

    async def _hand_out(self, run: RunView, lease: _Lease) -> ClaimedBatch | None:
        """The lease with its trajectories, without those that have nothing to train; None if none is left.

        Turns are read outside the writing transaction: they never change, and which ones belong is written down.
        """
        counts = {candidate.id: candidate.turn_count for unit in lease.units for candidate in unit}
        async with self._database.read() as connection:
            turns = await connection.run_sync(lambda found: TurnRepository(found).turns_of(counts))
        groups: list[TrajectoryGroup] = []
        untrainable: list[str] = []
        for unit in lease.units:
            trajectories: list[Trajectory] = []
            for candidate in unit:
                trajectory = _trajectory(candidate, turns[candidate.id], lease.rewards[candidate.id])
                if trajectory is None:
                    untrainable.append(candidate.id)
                else:
                    trajectories.append(trajectory)
            if trajectories:
                groups.append(TrajectoryGroup(id=trajectories[0].group_id, trajectories=tuple(trajectories)))
        claim_id = lease.reply.claim_id
        if untrainable and claim_id is not None:
            await self._exclude(run, claim_id, untrainable, nothing_left=not groups)
        if not groups:
            return None
        return _batch(
            claim_id,
            lease_expires_at=lease.reply.lease_expires_at,
            base_version=lease.reply.base_version,
            groups=groups,
        )

    async def _exclude(
        self, run: RunView, claim_id: ClaimId, session_ids: Sequence[str], *, nothing_left: bool
    ) -> None:
        now = self._clock()
        async with self._database.write() as connection:
            repository = ClaimRepository(connection)
            await repository.exclude(claim_id, session_ids)
            if nothing_left:
                await repository.end(claim_id, ClaimState.RELEASED, reward_weights={}, now=now)
            data = {"count": len(session_ids), "reason": "no trainable turn"}
            await append_event(connection, run_id=run.id, kind="sessions.excluded", data=data, now=now)
        self._changed()

    def _changed(self) -> None:
        self._signals.trajectories.notify()
        self._signals.events.notify()


def _trajectory(candidate: Candidate, turns: Sequence[Turn], rewards: HandedRewards) -> Trajectory | None:
    """None where nothing can be trained: no turn drawn from the policy, or turns that do not fit together."""
    try:
        trajectory = assemble(
            turns,
            session_id=SessionId(candidate.id),
            group_id=None if candidate.group_id is None else GroupId(candidate.group_id),
            task=candidate.task,
            reward=rewards.reward,
            turn_rewards=rewards.turn_rewards,
        )
    except BrokenTree:
        return None
    return trajectory if any(turn.trainable for turn in trajectory.turns) else None


def _batch(
    claim_id: ClaimId | None,
    *,
    lease_expires_at: float,
    base_version: int,
    groups: Sequence[TrajectoryGroup] = (),
) -> ClaimedBatch:
    return ClaimedBatch(
        claim_id=claim_id, lease_expires_at=lease_expires_at, base_version=base_version, groups=tuple(groups)
    )


def _check(request: ClaimRequest) -> None:
    if not 1 <= request.want <= MAX_WANT:
        raise InvalidRequest(f"want is 1 to {MAX_WANT}, not {request.want}", param="want")
    if not 1 <= request.at_least <= request.want:
        raise InvalidRequest(f"at_least is 1 to want, not {request.at_least}", param="at_least")
    if request.max_staleness < 0:
        raise InvalidRequest(f"max_staleness is 0 or more, not {request.max_staleness}", param="max_staleness")
    if not 0 <= request.wait_s <= MAX_WAIT_SECONDS:
        raise InvalidRequest(f"wait_s is 0 to {MAX_WAIT_SECONDS:.0f}, not {request.wait_s}", param="wait_s")


def _gone(claim_id: ClaimId, known: tuple[ClaimState, float] | None) -> Conflict:
    if known is None:
        return Conflict(f"there is no claim {claim_id!r} in this run")
    state = ClaimState.EXPIRED if known[0] is ClaimState.LEASED else known[0]
    return Conflict(f"the claim {claim_id} is {state.value}")
