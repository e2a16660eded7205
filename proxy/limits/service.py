"""Enforce the limits of runs: a call asks before it begins and pays for its tokens after it has ended.

Each proxy takes calls from the store for up to a second in advance and pays for the tokens of several calls together,
so most calls do not wait for the store. A run without limits costs nothing. See `docs/decisions/0024-rate-limits.md`.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.database.unit_of_work import Database
from proxy.errors import RateLimited, StoreUnavailable, TokensLimited, TrainerBehind
from proxy.limits.bucket import Rate
from proxy.limits.repository import LimitRepository
from proxy.limits.share import Kind, Rates, Refusal, Share, Standing, Trade
from proxy.runs.service import RunView
from proxy.settings import LimitSettings

# Delay after which used tokens are paid, and until which other proxies do not know of them.
_PAY_SECONDS = 1.0

# How long a count of waiting trajectories is reused.
_COUNT_SECONDS = 1.0

# Retry-After of a refused session. A trainer takes its trajectories in batches, so room comes in steps.
_RETRY_OPENING_SECONDS = 5


class LimitObserver(Protocol):
    """Receiver of every refused call, for the metrics. It must not raise and not wait."""

    def call_limited(self, *, limit: str, run: str) -> None:
        """`limit` is the setting's name."""
        ...


class Admission:
    """The admission of one call by the limits of its run. It counts once, however often the methods are called."""

    def __init__(self, limits: RunLimits, run: RunView) -> None:
        self._limits = limits
        self._run = run
        self._is_granted = False

    async def to_open(self) -> None:
        """Admit a call that opens a session. Raise RateLimited if a limit is reached."""
        if not self._is_granted:
            await self._limits.check_waiting(self._run)
        await self.to_begin()

    async def to_begin(self) -> None:
        """Admit a call of a known session. Raise RateLimited if a limit is reached."""
        if not self._is_granted:
            await self._limits.begin_call(self._run)
            self._is_granted = True


@dataclass
class _RunShare:
    """This proxy's share of a run's limits. `waiting` calls wait for a trade with the store.

    `trading` lets one call at a time trade: it takes calls for the others that wait.
    """

    run_id: RunId
    limits: LimitSettings
    share: Share
    trading: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    paying: asyncio.Task[None] | None = None


class RunLimits:
    """The limits of every run, in this process."""

    def __init__(self, database: Database, clock: Clock, observer: LimitObserver | None = None) -> None:
        self._database = database
        self._clock = clock
        self._observer = observer
        self._shares: dict[RunId, _RunShare] = {}
        self._ready_counts: dict[RunId, tuple[float, int, bool]] = {}  # (time, bound, whether there are more)

    def admission(self, run: RunView) -> Admission | None:
        """Return the admission that a call of the run needs; None if the run has no limits."""
        return Admission(self, run) if run.settings.limits.are_on else None

    async def check_waiting(self, run: RunView) -> None:
        """Raise TrainerBehind if too many trajectories wait, so that no session may be opened for training now."""
        bound = run.settings.limits.max_waiting
        if bound is None or not await self._has_more_ready(run.id, bound):
            return
        self._report_refusal("max_waiting", run)
        raise TrainerBehind(
            f"more than {bound} trajectories of the run {run.name!r} wait for its trainer (run.limits.max_waiting): "
            f"open sessions continue, and new ones are opened once it has caught up; try again in "
            f"{_RETRY_OPENING_SECONDS} seconds, and check that the trainer is running",
            retry_after=_RETRY_OPENING_SECONDS,
        )

    async def begin_call(self, run: RunView) -> None:
        """Begin a call. Raise RateLimited if it must wait, StoreUnavailable if the store cannot be asked."""
        if not run.settings.limits.bound_calls:
            return
        state = self._share_of(run)
        state.waiting += 1
        try:
            if self._may_begin(run, state.share, self._clock()):
                return
            async with state.trading:
                share, now = state.share, self._clock()
                # Asked again: the call that traded while this one waited took a call for it as well.
                if not self._may_begin(run, share, now):
                    share.receive(await self._trade(state, share.wanted(state.waiting, now), now), now)
                    self._may_begin(run, share, now)
        finally:
            state.waiting -= 1

    def used(self, run: RunView, tokens: int) -> None:
        """Record that a call has ended whose prompt and answer have so many tokens together."""
        if tokens and run.settings.limits.tokens_per_minute is not None:
            state = self._share_of(run)
            state.share.owed += tokens
            if state.paying is None or state.paying.done():
                state.paying = asyncio.create_task(self._pay_soon(state), name=f"pay tokens of {run.id}")

    async def pay(self) -> None:
        """Write the used tokens to the store. Raise StoreUnavailable; the tokens stay owed then."""
        for state in list(self._shares.values()):
            await self._pay(state)

    def standings(self, run: RunView) -> tuple[Standing, ...]:
        """Return the state of each limit of the run, as far as this proxy knows it."""
        return self._share_of(run).share.standings(self._clock()) if run.settings.limits.bound_calls else ()

    async def aclose(self) -> None:
        """Stop the payments that wait for their delay, and pay at once."""
        for state in self._shares.values():
            if state.paying is not None:
                state.paying.cancel()
                await asyncio.wait([state.paying])
        with suppress(StoreUnavailable):
            await self.pay()

    async def _pay_soon(self, state: _RunShare) -> None:
        await asyncio.sleep(_PAY_SECONDS)
        with suppress(StoreUnavailable):
            await self._pay(state)

    async def _pay(self, state: _RunShare) -> None:
        async with state.trading:
            share = state.share
            if share.owed:
                share.paid(await self._trade(state, 0, self._clock()))

    def _may_begin(self, run: RunView, share: Share, now: float) -> bool:
        """Begin a call without the store. Return False if a trade is needed. Raise RateLimited."""
        refusal = share.refusal(now)
        if refusal is not None:
            raise self._refused(run, refusal)
        return share.use_call(now)

    async def _trade(self, state: _RunShare, calls: int, now: float) -> Trade:
        share = state.share
        rates, tokens = share.rates, share.owed

        def work(connection: Connection) -> Trade:
            return LimitRepository(connection).trade(state.run_id, rates, calls=calls, tokens=tokens, now=now)

        try:
            return await self._database.commit(work, order_key=state.run_id)
        except asyncio.CancelledError:
            share.owed -= tokens  # the transaction is completed although nobody waits for it
            raise

    async def _has_more_ready(self, run_id: RunId, bound: int) -> bool:
        now = self._clock()
        counted = self._ready_counts.get(run_id)
        if counted is None or counted[1] != bound or not counted[0] <= now < counted[0] + _COUNT_SECONDS:
            more = await self._database.read(
                lambda connection: LimitRepository(connection).has_more_ready(run_id, bound)
            )
            self._ready_counts[run_id] = counted = (now, bound, more)
        return counted[2]

    def _share_of(self, run: RunView) -> _RunShare:
        limits = run.settings.limits
        state = self._shares.get(run.id)
        if state is None:
            self._shares[run.id] = state = _RunShare(run.id, limits, Share(_rates(limits)))
        elif state.limits is not limits and state.limits != limits:
            owed = state.share.owed  # tokens stay owed when the limits change
            state.limits, state.share = limits, Share(_rates(limits))
            state.share.owed = owed
        return state

    def _refused(self, run: RunView, refusal: Refusal) -> RateLimited:
        limits, seconds = run.settings.limits, max(1, math.ceil(refusal.seconds))
        advice = f"for all its agents and proxies together; try again in {seconds} seconds"
        if refusal.kind is Kind.CALLS:
            self._report_refusal("calls_per_minute", run)
            return RateLimited(
                f"the run {run.name!r} accepts {limits.calls_per_minute} calls a minute "
                f"(run.limits.calls_per_minute), {advice}",
                retry_after=seconds,
            )
        self._report_refusal("tokens_per_minute", run)
        return TokensLimited(
            f"the run {run.name!r} accepts {limits.tokens_per_minute} tokens a minute in prompts and answers "
            f"(run.limits.tokens_per_minute), {advice}",
            retry_after=seconds,
        )

    def _report_refusal(self, limit: str, run: RunView) -> None:
        if self._observer is not None:
            self._observer.call_limited(limit=limit, run=run.name)


def _rates(limits: LimitSettings) -> Rates:
    calls, tokens, burst = limits.calls_per_minute, limits.tokens_per_minute, limits.burst_seconds
    return Rates(
        calls=Rate(per_minute=calls, burst_seconds=burst) if calls is not None else None,
        tokens=Rate(per_minute=tokens, burst_seconds=burst) if tokens is not None else None,
    )
