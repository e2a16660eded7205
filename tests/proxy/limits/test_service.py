"""Limits on a real store: exact across proxies, and with few transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import select

from proxy.database.tables import LimitLevelRow
from proxy.database.unit_of_work import Database
from proxy.errors import RateLimited, TokensLimited, TrainerBehind
from proxy.lifecycle.check import check
from proxy.limits.service import Limits
from proxy.limits.subjects import Scope, Subject
from proxy.runs.service import RunView
from proxy.sessions.opening import SessionSpec
from proxy.settings import LimitSettings, RunSettings
from tests.proxy.store import Store, open_store


def settings(**limits: Any) -> RunSettings:
    return RunSettings(name="policy", model="base/model", limits=LimitSettings(**limits))


@asynccontextmanager
async def proxies(url: str, count: int, **limits: Any) -> AsyncIterator[tuple[Store, list[Limits]]]:
    """Limits of several proxies, each with its own connections, on one clock."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(url, settings(**limits)))
        found = [store.limits]
        for _ in range(count - 1):
            database = Database(url)
            stack.push_async_callback(database.aclose)
            found.append(Limits(database, store.clock))
            stack.push_async_callback(found[-1].aclose)
        yield store, found


def run_alone(run: RunView) -> tuple[Subject, ...]:
    """The subjects of a call whose project and key have no limits."""
    limits = run.settings.limits
    return (Subject(scope=Scope.RUN, id=run.id, name=run.name, limits=limits),) if limits.bound_calls else ()


async def begun(limits: Limits, run: RunView, calls: int) -> int:
    """Start `calls` calls at once and return how many begin."""
    outcomes = await asyncio.gather(
        *(limits.begin_call(run, run_alone(run)) for _ in range(calls)), return_exceptions=True
    )
    assert all(outcome is None or isinstance(outcome, RateLimited) for outcome in outcomes), outcomes
    return sum(outcome is None for outcome in outcomes)


async def rows(store: Store) -> dict[str, float]:
    found = await store.database.read(
        lambda connection: connection.execute(select(LimitLevelRow.kind, LimitLevelRow.due_at)).all()
    )
    return {row.kind: row.due_at for row in found}


class Transactions:
    """Counter of the transactions of a database."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        commit, read = store.database.commit, store.database.read

        def counted(method: Any) -> Any:
            async def run(*args: Any, **kwargs: Any) -> Any:
                self.count += 1
                return await method(*args, **kwargs)

            return run

        monkeypatch.setattr(store.database, "commit", counted(commit))
        monkeypatch.setattr(store.database, "read", counted(read))


async def test_without_limits_the_store_is_not_asked(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxies(database_url, 1) as (store, (limits,)):
        transactions = Transactions(store, monkeypatch)
        assert limits.admission(store.run, store.owner) is None
        await limits.begin_call(store.run, run_alone(store.run))
        await limits.check_waiting(store.run)
        limits.used(store.run, run_alone(store.run), 1_000_000)
        await limits.pay()
        assert (transactions.count, limits.standings(run_alone(store.run))) == (0, ())
        assert await rows(store) == {}


async def test_concurrent_proxies_begin_no_more_calls_than_are_allowed(database_url: str) -> None:
    """Nor much fewer: each proxy may have taken some calls that it did not use."""
    async with proxies(database_url, 3, calls_per_minute=600) as (store, several):
        at_once = sum(await asyncio.gather(*(begun(limits, store.run, 60) for limits in several)))
        assert 60 <= at_once <= 100
        store.clock.now += 2.0
        later = sum(await asyncio.gather(*(begun(limits, store.run, 60) for limits in several)))
        assert at_once + later <= 100 + 20
        assert later >= 10
        assert check(database_url) == []


async def test_proxies_that_take_one_call_at_a_time_begin_exactly_as_many_as_are_allowed(database_url: str) -> None:
    async with proxies(database_url, 3, calls_per_minute=60) as (store, several):
        for seconds, allowed in ((0.0, 10), (3.0, 3), (0.5, 0), (0.5, 1), (100.0, 10)):
            store.clock.now += seconds
            assert sum(await asyncio.gather(*(begun(limits, store.run, 20) for limits in several))) == allowed


async def test_many_calls_share_few_transactions(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxies(database_url, 1, calls_per_minute=60_000) as (store, (limits,)):
        transactions = Transactions(store, monkeypatch)
        assert await begun(limits, store.run, 500) == 500
        assert transactions.count <= 2, "one for the first, one for all that waited for it"
        for _ in range(1000):
            store.clock.now += 0.002
            await limits.begin_call(store.run, run_alone(store.run))
        assert transactions.count <= 6


async def test_a_refusal_names_the_limit_and_when_to_retry(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxies(database_url, 1, calls_per_minute=6, burst_seconds=1) as (store, (limits,)):
        await limits.begin_call(store.run, run_alone(store.run))
        with pytest.raises(
            RateLimited, match=r"'policy' accepts 6 calls a minute.*run\.limits\.calls_per_min"
        ) as caught:
            await limits.begin_call(store.run, run_alone(store.run))
        assert (caught.value.status, caught.value.type, caught.value.code) == (429, "requests", "rate_limit_exceeded")
        assert caught.value.retry_after == 10
        transactions = Transactions(store, monkeypatch)
        for _ in range(50):
            with pytest.raises(RateLimited):
                await limits.begin_call(store.run, run_alone(store.run))
        assert transactions.count == 0
        assert store.limited.refused == ["calls_per_minute"] * 51
        store.clock.now += caught.value.retry_after
        await limits.begin_call(store.run, run_alone(store.run))


async def test_tokens_are_paid_at_the_end_and_delay_every_proxy(database_url: str) -> None:
    async with proxies(database_url, 2, tokens_per_minute=6000) as (store, (one, other)):
        await one.begin_call(store.run, run_alone(store.run))
        one.used(store.run, run_alone(store.run), 7000)
        with pytest.raises(TokensLimited, match=r"6000 tokens a minute.*run\.limits\.tokens_per_minute") as caught:
            await one.begin_call(store.run, run_alone(store.run))
        assert (caught.value.type, caught.value.retry_after) == ("tokens", 61)
        with pytest.raises(TokensLimited) as caught:
            await other.begin_call(store.run, run_alone(store.run))
        assert caught.value.retry_after == 61
        store.clock.now += 61
        await other.begin_call(store.run, run_alone(store.run))
        await one.begin_call(store.run, run_alone(store.run))


async def test_owed_tokens_are_paid_when_the_limits_are_closed(database_url: str) -> None:
    async with proxies(database_url, 2, tokens_per_minute=6000) as (store, (one, other)):
        for _ in range(4):
            one.used(store.run, run_alone(store.run), 1000)
        await one.pay()
        assert await rows(store) == {"tokens": pytest.approx(store.clock.now + 40.0)}
        one.used(store.run, run_alone(store.run), 1000)
        await one.aclose()
        assert await rows(store) == {"tokens": pytest.approx(store.clock.now + 50.0)}
        with pytest.raises(TokensLimited):
            await other.begin_call(store.run, run_alone(store.run))


async def test_a_call_refused_for_tokens_takes_no_calls(database_url: str) -> None:
    async with proxies(database_url, 1, tokens_per_minute=60, calls_per_minute=60) as (store, (limits,)):
        limits.used(store.run, run_alone(store.run), 1000)
        with pytest.raises(TokensLimited):
            await limits.begin_call(store.run, run_alone(store.run))
        assert list(await rows(store)) == ["tokens"]


async def test_a_changed_limit_applies_at_once(database_url: str) -> None:
    async with proxies(database_url, 1, calls_per_minute=1) as (store, (limits,)):
        await limits.begin_call(store.run, run_alone(store.run))
        with pytest.raises(RateLimited):
            await limits.begin_call(store.run, run_alone(store.run))
        assert await begun(limits, await store.runs.ensure(settings(calls_per_minute=600)), 90) == 89, "one was used"
        lowered = await store.runs.ensure(settings(calls_per_minute=1))
        assert await begun(limits, lowered, 1) == 0
        store.clock.now += 10
        assert await begun(limits, lowered, 2) == 1
        assert await begun(limits, await store.runs.ensure(settings()), 1000) == 1000


async def test_a_cancelled_call_does_not_block_others(database_url: str) -> None:
    async with proxies(database_url, 1, calls_per_minute=600, tokens_per_minute=600) as (store, (limits,)):
        limits.used(store.run, run_alone(store.run), 50)
        left = asyncio.ensure_future(limits.begin_call(store.run, run_alone(store.run)))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        await limits.begin_call(store.run, run_alone(store.run))
        assert (await rows(store))["tokens"] == pytest.approx(store.clock.now + 5.0), "paid once"


async def test_sessions_are_only_opened_while_the_trainer_keeps_up(database_url: str) -> None:
    async with proxies(database_url, 1, max_waiting=2) as (store, (limits,)):
        for _ in range(2):
            await ready(store)
        await limits.check_waiting(store.run)
        await ready(store)
        await limits.check_waiting(store.run)  # counted a moment ago
        store.clock.now += 1
        with pytest.raises(TrainerBehind, match=r"more than 2 trajectories.*run\.limits\.max_waiting") as caught:
            await limits.check_waiting(store.run)
        assert (caught.value.code, caught.value.retry_after) == ("trainer_behind", 5)
        assert store.limited.refused == ["max_waiting"]
        await store.database.commit(
            lambda connection: connection.exec_driver_sql("UPDATE sessions SET training = 'consumed'")
        )
        store.clock.now += 1
        await limits.check_waiting(store.run)


async def ready(store: Store) -> None:
    (session,) = await store.sessions.create(store.run, SessionSpec())
    await store.set_session(session.id, state="ended", training="ready")
