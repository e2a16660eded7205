"""Claims: leases of trajectories to trainers. A trajectory is in at most one live claim, and is claimable again once
the claim's lease has passed.

A request waits until enough sessions are ready in whole groups. `signals.trajectories` wakes it when a session
becomes ready. Changes that send no signal (group time-outs, leases that pass, other proxies) are noticed once a
second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import structlog
from sqlalchemy import Connection

from proxy.claims.handing_out import Lease, empty_batch, hand_out
from proxy.claims.hints import HintMaker
from proxy.claims.leasing import (
    Attempt,
    Found,
    Raced,
    Unrewarded,
    end_claim,
    exclude,
    expire_some,
    find,
    has_overdue,
    lease,
    read_trajectories,
)
from proxy.claims.repository import ClaimRepository
from proxy.claims.selection import Candidate
from proxy.clock import Clock
from proxy.contract.claim import ClaimedBatch, ClaimRequest, LeaseReply, ReleasedClaims
from proxy.contract.identifiers import ClaimId
from proxy.contract.states import ClaimState
from proxy.contract.trajectory import Trajectory
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.engines.activity import EngineActivity
from proxy.errors import Conflict, InvalidRequest
from proxy.lifecycle.lifecycle import settle
from proxy.lifecycle.signals import Signals
from proxy.runs.asking import AskedBatches
from proxy.runs.service import RunView
from proxy.tokens.template import ChatTemplate

MAX_WAIT_SECONDS = 60.0
MAX_WANT = 8192
MAX_PROCESS = 64
# How often a waiting claim looks for changes that send no signal: time-outs, and other proxies.
_RECHECK_SECONDS = 1.0
# The largest batch that is put together on the event loop. A larger one takes too long, so a thread does it.
REWARDED_ON_LOOP = 512

Abandoned = Callable[[], Awaitable[bool]]
TemplateOf = Callable[[RunView], Awaitable[ChatTemplate | None]]

_log = structlog.get_logger("proxy.claims")


async def _never() -> bool:
    return False


class ClaimView(msgspec.Struct, frozen=True, kw_only=True):
    """A claim in the list of claims. A claim past its lease has the state `expired` even before the sweep ends it.
    `sessions` is the number of trajectories in it."""

    id: ClaimId
    trainer: str
    process: str | None
    state: ClaimState
    sessions: int
    base_version: int
    committed_version: int | None
    created_at: float
    lease_expires_at: float


class ClaimService:
    """Claims of all runs. Methods raise InvalidRequest for an invalid request, Conflict for a claim that is not
    live."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        signals: Signals,
        activity: EngineActivity | None = None,
        asked: AskedBatches | None = None,
        template_of: TemplateOf | None = None,
    ) -> None:
        """`template_of` returns the chat template of a run's model, None if it cannot be loaded."""
        self._database = database
        self._clock = clock
        self._signals = signals
        self._activity = activity
        self._asked = asked
        self._template_of = template_of
        self._closed = False

    def close(self) -> None:
        """Stop waiting: pending and later requests return at once with what is ready."""
        self._closed = True
        self._signals.trajectories.notify()

    async def claim(self, run: RunView, request: ClaimRequest, *, abandoned: Abandoned = _never) -> ClaimedBatch:
        """Lease about `want` trajectories, waiting up to `wait_s` for them. Return an empty batch if there are too
        few.

        `abandoned` returns whether the client has disconnected. Nothing is leased then, and a lease made while the
        client disconnected is released.
        """
        batch = await self._claim(run, request, abandoned)
        if batch.claim_id is not None:
            batch = msgspec.structs.replace(batch, max_new_tokens=run.settings.max_new_tokens)
        return batch if self._activity is None else msgspec.structs.replace(batch, engine=self._activity.read())

    async def _claim(self, run: RunView, request: ClaimRequest, abandoned: Abandoned) -> ClaimedBatch:
        _check(request)
        if self._asked is not None:
            self._asked.note(run.id, request.want, self._clock())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_s
        while True:
            seen = self._signals.trajectories.count
            remaining = 0.0 if self._closed else deadline - loop.time()
            # While there is time only a full batch is worth a step; at the end the trainer takes what there is.
            minimum = request.want if remaining > 0 else request.at_least
            if await abandoned():
                break
            batch = await self._attempt(run, request, minimum)
            if batch is not None:
                # The client left while the lease was committed: nobody would train on it until the lease passes.
                if batch.claim_id is not None and await abandoned():
                    await self.release(run, batch.claim_id)
                return batch
            if remaining <= 0:
                break
            await self._signals.trajectories.wait(min(remaining, _RECHECK_SECONDS), since=seen)
        standing = await self._database.read(lambda connection: ClaimRepository(connection).run(run.id))
        return empty_batch(base_version=standing.head_version, now=self._clock())

    async def heartbeat(self, run: RunView, claim_id: ClaimId) -> LeaseReply:
        """Extend a live lease. Raise Conflict if it has passed."""
        now = self._clock()
        expires_at = now + run.settings.lease_seconds

        def extend(connection: Connection) -> None:
            repository = ClaimRepository(connection)
            # Only the claim is locked: a heartbeat must not wait for a claim or a commit of the run.
            known = repository.state(claim_id, run.id)
            if known is None or known[0] is not ClaimState.LEASED or known[1] <= now:
                raise _gone(claim_id, known)
            repository.extend(claim_id, expires_at)

        await self._database.commit(extend)
        return LeaseReply(claim_id=claim_id, lease_expires_at=expires_at)

    async def release(self, run: RunView, claim_id: ClaimId) -> None:
        """Release a claim, so that its trajectories are claimable at once. Do nothing if it was released before.

        Raise Conflict if it was committed or has expired.
        """
        now = self._clock()

        def release(connection: Connection) -> bool:
            repository = ClaimRepository(connection)
            repository.commit_without_flush()
            repository.run(run.id, lock=True)  # the run before its claims: the lock order of all transactions
            known = repository.state(claim_id, run.id)
            if known is not None and known[0] is ClaimState.RELEASED:
                return False
            if known is None or known[0] is not ClaimState.LEASED:
                raise _gone(claim_id, known)
            end_claim(connection, run.id, claim_id, ClaimState.RELEASED, now=now)
            return True

        if await self._database.commit(release):
            self._changed()

    async def release_abandoned(self, run: RunView, process: str) -> ReleasedClaims:
        """Release all claims of a trainer's process: one known to be dead, or the caller itself as it ends."""
        now = self._clock()

        def release(connection: Connection) -> list[ClaimId]:
            repository = ClaimRepository(connection)
            repository.run(run.id, lock=True)
            claim_ids = repository.of_process(run.id, process)
            for claim_id in claim_ids:
                end_claim(connection, run.id, claim_id, ClaimState.RELEASED, now=now)
            return claim_ids

        claim_ids = await self._database.commit(release)
        if claim_ids:
            self._changed()
        return ReleasedClaims(claim_ids=tuple(claim_ids))

    async def list_(self, run: RunView, *, limit: int) -> list[ClaimView]:
        """Return the run's claims, leased ones first, then newest first."""
        now = self._clock()
        rows = await self._database.read(lambda connection: ClaimRepository(connection).listed(run.id, limit))
        return [_view(row, sessions, now) for row, sessions in rows]

    async def expire(self) -> int:
        """End the claims of all runs whose lease has passed, and return their number."""
        total = 0
        while await self._database.read(partial(has_overdue, now=self._clock())):
            total += await self._database.commit(partial(expire_some, now=self._clock()))
        if total:
            self._changed()
        return total

    async def sweep(self) -> None:
        """Expire claims; run periodically, so that sessions become claimable even if no trainer asks."""
        await self.expire()

    async def _attempt(self, run: RunView, request: ClaimRequest, minimum: int) -> ClaimedBatch | None:
        """Claim at least `minimum` trajectories, or return None."""
        # Found without a lock first: while trainers wait, each asks every second and mostly there is nothing to
        # write.
        attempt = Attempt(run, request, minimum, self._clock())
        found = await self._database.read(partial(find, attempt=attempt))
        if found.overdue:
            await self.expire()
            found = await self._database.read(partial(find, attempt=attempt))
        if not found.is_promising(minimum):
            return None
        # Turns never change, so they are read while the lease is being committed.
        read = asyncio.create_task(self._read(found.leasable))
        try:
            lease = await self._lease(attempt, found)
        except Unrewarded as unrewarded:
            session_ids = unrewarded.session_ids
            await self._database.commit(lambda connection: settle(connection, session_ids, now=self._clock()))
            return None
        finally:
            trajectories = await read
        if lease is None:
            return None
        if lease.candidates != found.leasable:
            trajectories = await self._read(lease.candidates)
        return await self._hand_out(run, lease, trajectories)

    async def _lease(self, attempt: Attempt, found: Found) -> Lease | None:
        """Lease what was found, or what is there now if that has changed."""
        # Two further attempts: under the run's lock, only a new turn can still interfere.
        for selected in (found, None, None):
            with suppress(Raced):
                return await self._database.commit(partial(lease, attempt=attempt, found=selected))
        return None

    async def _read(self, candidates: Sequence[Candidate]) -> dict[str, Trajectory | None]:
        """Return trajectories by session, each with the turns that belong to the claim."""
        if not candidates:
            return {}
        return await self._database.read(partial(read_trajectories, candidates=candidates))

    async def _hand_out(
        self, run: RunView, lease: Lease, trajectories: Mapping[str, Trajectory | None]
    ) -> ClaimedBatch | None:
        """Return the batch without trajectories that have nothing to train; None if none is left. Exclude those
        sessions."""
        # Hints are rendered, tokenised and placed by the whole prompts of their sessions.
        if len(lease.rewards) <= REWARDED_ON_LOOP and not lease.texts:
            batch, untrainable = hand_out(lease, trajectories)
        else:
            hint_maker = await self._hint_maker(run) if lease.texts else None
            batch, untrainable = await asyncio.to_thread(hand_out, lease, trajectories, hint_maker)
        if untrainable:
            leave_out = partial(
                exclude,
                run_id=run.id,
                claim_id=lease.claim_id,
                session_ids=untrainable,
                nothing_left=not batch.groups,
                now=self._clock(),
            )
            await self._database.commit(leave_out)
            self._changed()
        return batch if batch.groups else None

    async def _hint_maker(self, run: RunView) -> HintMaker | None:
        """Return what makes the hints of the run; None without a template that can write them."""
        template = None if self._template_of is None else await self._template_of(run)
        if template is None:
            return None
        try:
            return await asyncio.to_thread(HintMaker, template, run.settings.texts)
        except InvalidRequest as error:
            _log.warning("trainers get texts without hints", run=run.name, reason=error.message)
            return None

    def _changed(self) -> None:
        self._signals.trajectories.notify()
        self._signals.events.notify()


def _view(row: AnyRow, sessions: int, now: float) -> ClaimView:
    state = ClaimState(row.state)
    if state is ClaimState.LEASED and row.lease_expires_at <= now:
        state = ClaimState.EXPIRED
    return ClaimView(
        id=ClaimId(row.id),
        trainer=row.trainer,
        process=row.process,
        state=state,
        sessions=sessions,
        base_version=row.base_version,
        committed_version=row.committed_version,
        created_at=row.created_at,
        lease_expires_at=row.lease_expires_at,
    )


def _check(request: ClaimRequest) -> None:
    if not 1 <= request.want <= MAX_WANT:
        raise InvalidRequest(f"want is 1 to {MAX_WANT}, not {request.want}", param="want")
    if not 1 <= request.at_least <= request.want:
        raise InvalidRequest(f"at_least is 1 to want, not {request.at_least}", param="at_least")
    if request.process is not None and not 1 <= len(request.process) <= MAX_PROCESS:
        raise InvalidRequest(f"process is a name of 1 to {MAX_PROCESS} characters", param="process")
    if request.max_staleness < 0:
        raise InvalidRequest(f"max_staleness is 0 or more, not {request.max_staleness}", param="max_staleness")
    if not 0 <= request.wait_s <= MAX_WAIT_SECONDS:
        raise InvalidRequest(f"wait_s is 0 to {MAX_WAIT_SECONDS:.0f}, not {request.wait_s}", param="wait_s")


def _gone(claim_id: ClaimId, known: tuple[ClaimState, float] | None) -> Conflict:
    if known is None:
        return Conflict(f"there is no claim {claim_id!r} in this run")
    state = ClaimState.EXPIRED if known[0] is ClaimState.LEASED else known[0]
    return Conflict(f"the claim {claim_id} is {state.value}")
