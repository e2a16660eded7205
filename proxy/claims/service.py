"""Hands trajectories to trainers: each is in at most one live claim, and returns when the claim's lease passes.

What is waited for: enough ready sessions in whole groups. `signals.trajectories` wakes a waiting claim when a
session becomes ready; the passing of time (group time-outs, leases) and other processes are seen once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, Row

from proxy.claims.handing_out import Lease, assembled, hand_out, nothing
from proxy.claims.repository import ClaimRepository, RunStanding
from proxy.claims.selection import Bounds, Candidate, Selection, select_units
from proxy.clock import Clock
from proxy.contract.claim import ClaimedBatch, ClaimRequest, LeaseReply, ReleasedClaims
from proxy.contract.identifiers import ClaimId, RunId, new_claim_id
from proxy.contract.states import ClaimState
from proxy.contract.trajectory import Trajectory
from proxy.database.unit_of_work import Database
from proxy.engines.activity import EngineActivity
from proxy.errors import Conflict, InvalidRequest
from proxy.lifecycle.combining import session_rewards
from proxy.lifecycle.events import append_event
from proxy.lifecycle.lifecycle import ledger_of, settle
from proxy.lifecycle.signals import Signals
from proxy.runs.asking import AskedBatches
from proxy.runs.service import RunView
from proxy.turns.repository import TurnRepository

MAX_WAIT_SECONDS = 60.0
MAX_WANT = 8192
MAX_PROCESS = 64
_RECHECK_SECONDS = 1.0
_PAGE, _PAGE_AT_LEAST = 512, 16
_EXPIRED_AT_ONCE = 16
_REWARDED_AT_ONCE = 512
"""Trajectories that get their rewards on the loop; more of them on a thread of their own."""

Abandoned = Callable[[], Awaitable[bool]]


async def _never() -> bool:
    return False


class ClaimView(msgspec.Struct, frozen=True, kw_only=True):
    """A claim as people list it. `state`: leased, committed, released or expired; one past its lease is expired even
    before anybody has looked. `sessions` is how many trajectories it handed out."""

    id: ClaimId
    trainer: str
    process: str | None
    state: ClaimState
    sessions: int
    base_version: int
    committed_version: int | None
    created_at: float
    lease_expires_at: float


class _Raced(Exception):
    """A selected session was taken by another claim, or has another turn."""


class _Unrewarded(Exception):
    """By the run's rules as they are now, these ready sessions have no reward."""

    def __init__(self, session_ids: Sequence[str]) -> None:
        super().__init__(session_ids)
        self.session_ids = session_ids


class ClaimService:
    """Claims of all runs. Clients' mistakes raise InvalidRequest, a claim that is not live raises Conflict."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        signals: Signals,
        activity: EngineActivity | None = None,
        asked: AskedBatches | None = None,
    ) -> None:
        self._database = database
        self._clock = clock
        self._signals = signals
        self._activity = activity
        self._asked = asked
        self._closed = False

    def close(self) -> None:
        """Ends all waiting; claims then answer with what is there."""
        self._closed = True
        self._signals.trajectories.notify()

    async def claim(self, run: RunView, request: ClaimRequest, *, abandoned: Abandoned = _never) -> ClaimedBatch:
        """Lease about `want` trajectories, waiting up to `wait_s` for them; an empty batch if there are too few.

        Nothing is leased once `abandoned` says that nobody waits for the answer any more; what was leased while the
        one who asked went away is given back.
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
            minimum = request.want if remaining > 0 else request.at_least
            if await abandoned():
                break
            batch = await self._attempt(run, request, minimum)
            if batch is not None:
                if batch.claim_id is not None and await abandoned():
                    await self.release(run, batch.claim_id)
                return batch
            if remaining <= 0:
                break
            await self._signals.trajectories.wait(min(remaining, _RECHECK_SECONDS), since=seen)
        standing = await self._database.read(lambda connection: ClaimRepository(connection).run(run.id))
        return nothing(base_version=standing.head_version, now=self._clock())

    async def heartbeat(self, run: RunView, claim_id: ClaimId) -> LeaseReply:
        """Extends a live lease. Raises Conflict for one that has passed."""
        now = self._clock()
        expires_at = now + run.settings.lease_seconds

        def extend(connection: Connection) -> None:
            repository = ClaimRepository(connection)
            known = repository.state(claim_id, run.id)
            if known is None or known[0] is not ClaimState.LEASED or known[1] <= now:
                raise _gone(claim_id, known)
            repository.extend(claim_id, expires_at)

        await self._database.commit(extend)
        return LeaseReply(claim_id=claim_id, lease_expires_at=expires_at)

    async def release(self, run: RunView, claim_id: ClaimId) -> None:
        """Gives a claim's trajectories back at once. Released before: nothing changes. Raises Conflict otherwise."""
        now = self._clock()

        def release(connection: Connection) -> bool:
            repository = ClaimRepository(connection)
            repository.may_be_forgotten()
            repository.run(run.id, lock=True)
            known = repository.state(claim_id, run.id)
            if known is not None and known[0] is ClaimState.RELEASED:
                return False
            if known is None or known[0] is not ClaimState.LEASED:
                raise _gone(claim_id, known)
            _end(connection, run.id, claim_id, ClaimState.RELEASED, now=now)
            return True

        if await self._database.commit(release):
            self._changed()

    async def release_abandoned(self, run: RunView, process: str) -> ReleasedClaims:
        """Gives back what a trainer's process holds, which the caller knows to be dead, or
        which is the caller, at its end. Again: nothing is left."""
        now = self._clock()

        def release(connection: Connection) -> list[ClaimId]:
            repository = ClaimRepository(connection)
            repository.run(run.id, lock=True)
            claim_ids = repository.of_process(run.id, process)
            for claim_id in claim_ids:
                _end(connection, run.id, claim_id, ClaimState.RELEASED, now=now)
            return claim_ids

        claim_ids = await self._database.commit(release)
        if claim_ids:
            self._changed()
        return ReleasedClaims(claim_ids=tuple(claim_ids))

    async def list_(self, run: RunView, *, limit: int) -> list[ClaimView]:
        """The leased ones first, newest first."""
        now = self._clock()
        rows = await self._database.read(lambda connection: ClaimRepository(connection).listed(run.id, limit))
        return [_view(row, sessions, now) for row, sessions in rows]

    async def expire(self) -> int:
        """Returns the sessions of claims whose lease has passed, of all runs; how many claims there were."""
        total = 0
        while await self._database.read(partial(_overdue, now=self._clock())):
            total += await self._database.commit(partial(_expire_some, now=self._clock()))
        if total:
            self._changed()
        return total

    async def sweep(self) -> None:
        """For the background: what claims also do before they look."""
        await self.expire()

    async def _attempt(self, run: RunView, request: ClaimRequest, minimum: int) -> ClaimedBatch | None:
        """A claim of at least `minimum`, or None. Writes only if a look without a lock promises something."""
        asked = _Asked(run, request, minimum, self._clock())
        found = await self._database.read(partial(_find, asked=asked))
        if found.overdue:
            await self.expire()
            found = await self._database.read(partial(_find, asked=asked))
        if not found.is_promising(minimum):
            return None
        read = asyncio.create_task(self._read(found.leasable))
        try:
            lease = await self._leased(asked, found)
        except _Unrewarded as unrewarded:
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

    async def _leased(self, asked: _Asked, found: _Found) -> Lease | None:
        """Of what was found; or, where that has changed since, of what is there now."""
        for selected in (found, None, None):
            with suppress(_Raced):
                return await self._database.commit(partial(_lease, asked=asked, found=selected))
        return None

    async def _read(self, candidates: Sequence[Candidate]) -> dict[str, Trajectory | None]:
        """The trajectories of sessions, of the turns that a claim has of them; while they are leased, as they never
        change."""
        if not candidates:
            return {}
        return await self._database.read(partial(_trajectories, candidates=candidates))

    async def _hand_out(
        self, run: RunView, lease: Lease, trajectories: Mapping[str, Trajectory | None]
    ) -> ClaimedBatch | None:
        """The lease with its trajectories, without those that have nothing to train; None if none is left."""
        if len(lease.rewards) <= _REWARDED_AT_ONCE:
            batch, untrainable = hand_out(lease, trajectories)
        else:
            batch, untrainable = await asyncio.to_thread(hand_out, lease, trajectories)
        if untrainable:
            leave_out = partial(
                _exclude,
                run_id=run.id,
                claim_id=lease.claim_id,
                session_ids=untrainable,
                nothing_left=not batch.groups,
                now=self._clock(),
            )
            await self._database.commit(leave_out)
            self._changed()
        return batch if batch.groups else None

    def _changed(self) -> None:
        self._signals.trajectories.notify()
        self._signals.events.notify()


class _Asked(NamedTuple):
    """A request at one time; at least `minimum` trajectories, or none."""

    run: RunView
    request: ClaimRequest
    minimum: int
    now: float


class _Found(NamedTuple):
    """What a look without a lock selected. `overdue`: some claim's lease has passed."""

    standing: RunStanding
    selection: Selection
    overdue: bool

    def is_promising(self, minimum: int) -> bool:
        """Whether `_lease` may find something to do."""
        return self.selection.count >= minimum or bool(self.selection.stale)

    @property
    def leasable(self) -> list[Candidate]:
        """What can be leased as it is: nothing, where some is stale and `_lease` will select anew."""
        return [] if self.selection.stale else self.selection.candidates


def _find(connection: Connection, asked: _Asked) -> _Found:
    repository = ClaimRepository(connection)
    overdue = bool(repository.overdue(asked.now, 1))
    standing = repository.run(asked.run.id)
    if not standing.is_active or repository.ready_count(asked.run.id, asked.minimum) < asked.minimum:
        return _Found(standing, Selection(), overdue)
    return _Found(standing, _select(repository, standing, asked), overdue)


def _trajectories(connection: Connection, candidates: Sequence[Candidate]) -> dict[str, Trajectory | None]:
    turn_counts = {candidate.id: candidate.turn_count for candidate in candidates}
    return assembled(candidates, TurnRepository(connection).turns_of(turn_counts))


def _lease(connection: Connection, asked: _Asked, found: _Found | None) -> Lease | None:
    """Leases what was found, if that still stands; else selects under the lock, and marks what has become stale in
    any case. Raises _Raced where another took what was found, or it has another turn."""
    run, request, minimum, now = asked
    repository = ClaimRepository(connection)
    repository.may_be_forgotten()
    standing = repository.run(run.id, lock=True)
    if not standing.is_active:
        return None
    if found is not None and found.standing == standing and not found.selection.stale:
        selection = found.selection
    else:
        selection = _select(repository, standing, asked)
    if selection.stale:
        stale = [candidate.id for candidate in selection.stale]
        repository.mark_stale(stale)
        data = {"count": len(stale), "head": standing.head_version, "max_staleness": request.max_staleness}
        append_event(connection, run_id=run.id, kind="sessions.stale", data=data, now=now)
    if selection.count < minimum:
        return None
    candidates = selection.candidates
    session_ids = [candidate.id for candidate in candidates]
    claim_id = new_claim_id()
    expires_at = now + run.settings.lease_seconds
    repository.insert_claim(claim_id, run.id, request, standing=standing, now=now, lease_expires_at=expires_at)
    if not repository.lease(claim_id, candidates):
        raise _Raced
    ledger = ledger_of(connection, session_ids)
    rewards = {name: session_rewards(entries, standing.reward_rules) for name, entries in ledger.items()}
    unrewarded = [name for name, found in rewards.items() if not found.is_rewarded]
    if unrewarded:
        raise _Unrewarded(unrewarded)
    repository.hand_out(claim_id, candidates, rewards)
    return Lease(
        claim_id=claim_id,
        expires_at=expires_at,
        base_version=standing.head_version,
        units=selection.units,
        rewards=rewards,
    )


def _select(repository: ClaimRepository, standing: RunStanding, asked: _Asked) -> Selection:
    run, request = asked.run, asked.request
    bounds = Bounds(
        oldest_version=standing.head_version - request.max_staleness,
        group_timeout=run.settings.group_timeout_seconds,
        now=asked.now,
    )
    selection = Selection()
    seen: set[str] = set()
    last: Candidate | None = None
    while selection.count < request.want:
        size = min(_PAGE, 2 * (request.want - selection.count) + _PAGE_AT_LEAST)
        page = repository.ready_page(run.id, last, size)
        named = {candidate.group_id: None for candidate in page if candidate.group_id is not None}
        groups = repository.groups([group_id for group_id in named if group_id not in seen])
        select_units(page, groups, bounds, want=request.want, seen=seen, selection=selection)
        if len(page) < size:
            break
        last = page[-1]
    return selection


def _overdue(connection: Connection, now: float) -> bool:
    return bool(ClaimRepository(connection).overdue(now, 1))


def _expire_some(connection: Connection, now: float) -> int:
    repository = ClaimRepository(connection)
    overdue = repository.overdue(now, _EXPIRED_AT_ONCE)
    for run_id, claim_id in sorted((run_id, claim_id) for claim_id, run_id in overdue):
        repository.run(run_id, lock=True)
        known = repository.state(claim_id, run_id)
        if known is None or known[0] is not ClaimState.LEASED or known[1] > now:
            continue  # another proxy ended or extended it meanwhile
        _end(connection, run_id, claim_id, ClaimState.EXPIRED, now=now)
    return len(overdue)


def _exclude(
    connection: Connection,
    *,
    run_id: RunId,
    claim_id: ClaimId,
    session_ids: Sequence[str],
    nothing_left: bool,
    now: float,
) -> None:
    repository = ClaimRepository(connection)
    repository.run(run_id, lock=True)
    repository.exclude(claim_id, session_ids)
    if nothing_left:
        repository.end(claim_id, ClaimState.RELEASED, now=now)
    data = {"count": len(session_ids), "reason": "no trainable turn"}
    append_event(connection, run_id=run_id, kind="sessions.excluded", data=data, now=now)


def _end(connection: Connection, run_id: str, claim_id: ClaimId, state: ClaimState, *, now: float) -> None:
    count = ClaimRepository(connection).end(claim_id, state, now=now)
    data = {"claim": claim_id, "sessions": count}
    append_event(connection, run_id=run_id, kind=f"claim.{state.value}", data=data, now=now)


def _view(row: Row[*tuple[Any, ...]], sessions: int, now: float) -> ClaimView:
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
