"""This proxy's share of the limits of one subject, and its trades with the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import RunId
from proxy.database.unit_of_work import Database
from proxy.errors import StoreUnavailable
from proxy.lifecycle.events import append_event
from proxy.limits.bucket import Rate
from proxy.limits.budget import Budget, Period
from proxy.limits.repository import LimitRepository
from proxy.limits.share import Rates, Refusal, Share, Standing, Trade
from proxy.limits.subjects import Subject
from proxy.settings import UsageLimits

# Delay after which used tokens are paid, and until which other proxies do not know of them.
_PAY_SECONDS = 1.0


class SubjectShare:
    """The calls that this proxy may begin for a subject, and the tokens that it owes."""

    def __init__(self, subject: Subject, database: Database, clock: Clock, exhausted: Callable[[], None]) -> None:
        """`exhausted` is called after a budget was found exhausted, which the event log then has."""
        self.subject = subject
        self._database = database
        self._clock = clock
        self._exhausted = exhausted
        self._share = Share(rates_of(subject.limits))
        # One call at a time trades: it takes calls for the others that wait.
        self._trading = asyncio.Lock()
        self._waiting = 0
        self._paying: asyncio.Task[None] | None = None
        self._run_id: RunId | None = None  # of the latest call that used tokens

    def follow(self, subject: Subject) -> None:
        """Use the subject's limits as they are now."""
        if subject.limits is not self.subject.limits and subject.limits != self.subject.limits:
            owed = self._share.owed  # tokens stay owed when the limits change
            self._share = Share(rates_of(subject.limits))
            self._share.owed = owed
        self.subject = subject

    def refusal(self) -> Refusal | None:
        """Return the last refusal while it applies."""
        return self._share.refusal(self._clock())

    async def begin_call(self) -> Refusal | None:
        """Begin a call. Return None, or why it must wait. Raise StoreUnavailable if the store cannot be asked."""
        self._waiting += 1
        try:
            refusal, begun = self._try_to_begin()
            if refusal is not None or begun:
                return refusal
            async with self._trading:
                # Asked again: the call that traded while this one waited took a call for it as well.
                refusal, begun = self._try_to_begin()
                if refusal is None and not begun:
                    share, now = self._share, self._clock()
                    share.receive(await self._trade(share, share.wanted(self._waiting, now), now), now)
                    refusal, _begun = self._try_to_begin()
                return refusal
        finally:
            self._waiting -= 1

    def return_call(self) -> None:
        """Take back a call that did not begin, because another subject's limit refused it."""
        self._share.return_call(self._clock())

    def used(self, tokens: int, run_id: RunId) -> None:
        """Record the tokens of a call of the run that has ended."""
        self._share.owed += tokens
        self._run_id = run_id
        if self._paying is None or self._paying.done():
            self._paying = asyncio.create_task(self._pay_soon(), name=f"pay tokens of {self.subject.id}")

    async def pay(self) -> None:
        """Write the used tokens to the store. Raise StoreUnavailable; the tokens stay owed then."""
        async with self._trading:
            share = self._share
            if share.owed:
                share.paid(await self._trade(share, 0, self._clock()))

    def standings(self) -> tuple[Standing, ...]:
        return self._share.standings(self._clock())

    async def stop_paying(self) -> None:
        """Stop a payment that waits for its delay. The tokens stay owed."""
        if self._paying is not None:
            self._paying.cancel()
            await asyncio.wait([self._paying])

    async def _pay_soon(self) -> None:
        await asyncio.sleep(_PAY_SECONDS)
        with suppress(StoreUnavailable):
            await self.pay()

    def _try_to_begin(self) -> tuple[Refusal | None, bool]:
        """Begin a call without the store, if that is possible. Return the refusal, and whether the call has begun;
        with neither, a trade is needed."""
        now = self._clock()
        refusal = self._share.refusal(now)
        return refusal, refusal is None and self._share.use_call(now)

    async def _trade(self, share: Share, calls: int, now: float) -> Trade:
        subject, run_id, rates, tokens = self.subject, self._run_id, share.rates, share.owed

        def work(connection: Connection) -> tuple[Trade, tuple[Period, ...]]:
            repository = LimitRepository(connection)
            traded, exhausted = repository.trade(subject.id, rates, calls=calls, tokens=tokens, now=now)
            for budget in rates.budgets:
                if budget.period in exhausted:
                    # The run may have been deleted since its call ended.
                    paid_by = run_id if run_id is not None and repository.knows_run(run_id) else None
                    data = _exhausted(subject, budget, traded.levels.spent[budget.period].tokens)
                    append_event(connection, run_id=paid_by, kind="budget.exhausted", data=data, now=now)
            return traded, exhausted

        try:
            traded, exhausted = await self._database.commit(work, order_key=subject.id)
        except asyncio.CancelledError:
            share.owed -= tokens  # the transaction is completed although nobody waits for it
            raise
        if exhausted:
            self._exhausted()
        return traded


def rates_of(limits: UsageLimits) -> Rates:
    """Return the rates and budgets of the settings."""
    calls, tokens, burst = limits.calls_per_minute, limits.tokens_per_minute, limits.burst_seconds
    return Rates(
        calls=Rate(per_minute=calls, burst_seconds=burst) if calls is not None else None,
        tokens=Rate(per_minute=tokens, burst_seconds=burst) if tokens is not None else None,
        budgets=budgets_of(limits),
    )


def budgets_of(limits: UsageLimits) -> tuple[Budget, ...]:
    """Return the budgets of the settings."""
    given = {Period.DAY: limits.tokens_per_day, Period.MONTH: limits.tokens_per_month}
    return tuple(Budget(period=period, tokens=tokens) for period, tokens in given.items() if tokens is not None)


def _exhausted(subject: Subject, budget: Budget, used: int) -> dict[str, object]:
    return {
        "scope": subject.scope.value,
        "id": subject.id,
        "name": subject.name,
        "period": budget.period.value,
        "budget": budget.tokens,
        "used": used,
    }
