"""Limits of runs as they are kept: calls ask before they begin, and pay their tokens when they have ended.

Each proxy takes calls from the store for up to a second in advance and pays tokens together, so that most calls wait
for nothing. A run without limits costs nothing. See `docs/decisions/0024-rate-limits.md`.
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

_PAY_SECONDS = 1.0
"""How long tokens that were used may be unknown to other proxies."""

_COUNT_SECONDS = 1.0
"""How long a count of waiting trajectories is good enough."""

_RETRY_OPENING_SECONDS = 5
"""A trainer takes its trajectories a batch at a time."""


class LimitObserver(Protocol):
    """Hears of every call that was refused. It must not raise and not wait."""

    def call_limited(self, *, limit: str, run: str) -> None:
        """`limit` is the setting's name."""
        ...


class Admission:
    """Of one call: asked for once, whoever asks."""

    def __init__(self, limits: RunLimits, run: RunView) -> None:
        self._limits = limits
        self._run = run
        self._is_given = False

    async def to_open(self) -> None:
        """Before the call opens a session. Raises RateLimited."""
        if not self._is_given:
            await self._limits.check_waiting(self._run)
        await self.to_begin()

    async def to_begin(self) -> None:
        """Before it begins. Raises RateLimited."""
        if not self._is_given:
            await self._limits.begin_call(self._run)
            self._is_given = True


@dataclass
class _Kept:
    """A run's share by these limits, and who waits for the store on its behalf."""

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
        self._kept: dict[RunId, _Kept] = {}
        self._counted: dict[RunId, tuple[float, int, bool]] = {}

    def admission(self, run: RunView) -> Admission | None:
        """What a call of the run must ask; None where it need not."""
        return Admission(self, run) if run.settings.limits.are_on else None

    async def check_waiting(self, run: RunView) -> None:
        """Raises TrainerBehind where no session is to be opened for training now."""
        bound = run.settings.limits.max_waiting
        if bound is None or not await self._more_are_waiting(run.id, bound):
            return
        self._tell("max_waiting", run)
        raise TrainerBehind(
            f"more than {bound} trajectories of the run {run.name!r} wait for its trainer (run.limits.max_waiting): "
            f"open sessions go on, and others are opened once it has caught up; try again in "
            f"{_RETRY_OPENING_SECONDS} seconds, and look whether the trainer runs",
            retry_after=_RETRY_OPENING_SECONDS,
        )

    async def begin_call(self, run: RunView) -> None:
        """Raises RateLimited where the call must wait, StoreUnavailable where that cannot be known."""
        if not run.settings.limits.bound_calls:
            return
        kept = self._of(run)
        kept.waiting += 1
        try:
            if self._may_begin(run, kept.share, self._clock()):
                return
            async with kept.trading:
                share, now = kept.share, self._clock()
                if not self._may_begin(run, share, now):  # who traded meanwhile took for this call as well
                    share.receive(await self._trade(kept, share.wanted(kept.waiting, now), now), now)
                    self._may_begin(run, share, now)
        finally:
            kept.waiting -= 1

    def used(self, run: RunView, tokens: int) -> None:
        """A call has ended, and so many tokens were its prompt and its answer."""
        if tokens and run.settings.limits.tokens_per_minute is not None:
            kept = self._of(run)
            kept.share.owed += tokens
            if kept.paying is None or kept.paying.done():
                kept.paying = asyncio.create_task(self._pay_soon(kept), name=f"pay tokens of {run.id}")

    async def pay(self) -> None:
        """Tells the store of the tokens that were used here. Raises StoreUnavailable; they stay owed then."""
        for kept in list(self._kept.values()):
            await self._pay(kept)

    def standings(self, run: RunView) -> tuple[Standing, ...]:
        """What is left of each limit, as far as it is known here."""
        return self._of(run).share.standings(self._clock()) if run.settings.limits.bound_calls else ()

    async def aclose(self) -> None:
        """Pays what is owed."""
        for kept in self._kept.values():
            if kept.paying is not None:
                kept.paying.cancel()
                await asyncio.wait([kept.paying])
        with suppress(StoreUnavailable):
            await self.pay()

    async def _pay_soon(self, kept: _Kept) -> None:
        await asyncio.sleep(_PAY_SECONDS)
        with suppress(StoreUnavailable):
            await self._pay(kept)

    async def _pay(self, kept: _Kept) -> None:
        async with kept.trading:
            share = kept.share
            if share.owed:
                share.paid(await self._trade(kept, 0, self._clock()))

    def _may_begin(self, run: RunView, share: Share, now: float) -> bool:
        """Whether a call may begin by what is held; False where that must be traded. Raises RateLimited."""
        refusal = share.refusal(now)
        if refusal is not None:
            raise self._refused(run, refusal)
        return share.use_call(now)

    async def _trade(self, kept: _Kept, calls: int, now: float) -> Trade:
        share = kept.share
        rates, tokens = share.rates, share.owed

        def work(connection: Connection) -> Trade:
            return LimitRepository(connection).trade(kept.run_id, rates, calls=calls, tokens=tokens, now=now)

        try:
            return await self._database.commit(work, order_key=kept.run_id)
        except asyncio.CancelledError:
            share.owed -= tokens  # nobody waits for it, and it is done all the same
            raise

    async def _more_are_waiting(self, run_id: RunId, bound: int) -> bool:
        now = self._clock()
        counted = self._counted.get(run_id)
        if counted is None or counted[1] != bound or not counted[0] <= now < counted[0] + _COUNT_SECONDS:
            more = await self._database.read(
                lambda connection: LimitRepository(connection).more_are_waiting(run_id, bound)
            )
            self._counted[run_id] = counted = (now, bound, more)
        return counted[2]

    def _of(self, run: RunView) -> _Kept:
        limits = run.settings.limits
        kept = self._kept.get(run.id)
        if kept is None:
            self._kept[run.id] = kept = _Kept(run.id, limits, Share(_rates(limits)))
        elif kept.limits is not limits and kept.limits != limits:
            owed = kept.share.owed
            kept.limits, kept.share = limits, Share(_rates(limits))
            kept.share.owed = owed
        return kept

    def _refused(self, run: RunView, refusal: Refusal) -> RateLimited:
        limits, seconds = run.settings.limits, max(1, math.ceil(refusal.seconds))
        todo = f"by all its agents and proxies together; try again in {seconds} seconds"
        if refusal.kind is Kind.CALLS:
            self._tell("calls_per_minute", run)
            return RateLimited(
                f"the run {run.name!r} takes {limits.calls_per_minute} calls a minute (run.limits.calls_per_minute), "
                f"{todo}",
                retry_after=seconds,
            )
        self._tell("tokens_per_minute", run)
        return TokensLimited(
            f"the run {run.name!r} takes {limits.tokens_per_minute} tokens a minute, prompts and answers "
            f"(run.limits.tokens_per_minute), {todo}",
            retry_after=seconds,
        )

    def _tell(self, limit: str, run: RunView) -> None:
        if self._observer is not None:
            self._observer.call_limited(limit=limit, run=run.name)


def _rates(limits: LimitSettings) -> Rates:
    calls, tokens, burst = limits.calls_per_minute, limits.tokens_per_minute, limits.burst_seconds
    return Rates(
        calls=Rate(per_minute=calls, burst_seconds=burst) if calls is not None else None,
        tokens=Rate(per_minute=tokens, burst_seconds=burst) if tokens is not None else None,
    )
