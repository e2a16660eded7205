"""Limits of projects and keys on a real store: they bind every call of theirs, over several proxies and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select

from proxy.auth.access import Principal, PrincipalKind
from proxy.auth.service import KeyChange
from proxy.database.tables import EventRow, LimitLevelRow, TokenBudgetRow
from proxy.errors import BudgetExhausted, RateLimited, StoreUnavailable, TokensLimited
from proxy.limits.service import Admission, Limits
from proxy.projects.service import ProjectDirectory
from proxy.runs.service import RunView
from proxy.sessions.opening import SessionSpec
from proxy.settings import LimitSettings, RunSettings, UsageLimits
from tests.proxy.store import Store, open_store

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()


@dataclass
class Shop:
    """The project `shop` with two runs, and two proxies on its store."""

    store: Store
    projects: ProjectDirectory
    other_proxy: Limits
    key: str

    async def run(self, name: str = "policy", **limits: Any) -> RunView:
        settings = RunSettings(name=name, model="base/model", project="shop", limits=LimitSettings(**limits))
        return await self.store.runs.ensure(settings)

    async def holder(self) -> Principal:
        """Return the holder of the run key, as it is now."""
        return await self.store.credentials.authenticate(self.key)

    async def admission(self, limits: Limits, name: str = "policy") -> Admission:
        found = limits.admission(await self.store.runs.by_name(name), await self.holder())
        assert found is not None
        return found

    async def call(self, limits: Limits, name: str = "policy", *, tokens: int = 0) -> None:
        """Make a call through a proxy, which pays its tokens before it returns."""
        admission = await self.admission(limits, name)
        await admission.to_begin()
        admission.used(tokens)
        await limits.pay()

    async def events(self, kind: str) -> list[tuple[str | None, dict[str, Any]]]:
        statement = select(EventRow.run_id, EventRow.data).where(EventRow.kind == kind).order_by(EventRow.id)
        rows = await self.store.database.read(lambda connection: connection.execute(statement).all())
        return [(row.run_id, row.data) for row in rows]


@pytest.fixture
async def shop(database_url: str) -> AsyncIterator[Shop]:
    async with opened(database_url) as found:
        yield found


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Shop]:
    async with open_store(url, RunSettings(name="policy", model="base/model", project="shop")) as store:
        store.clock.now = NOON
        made = await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id, label="ci")
        other = Limits(store.database, store.clock)
        projects = ProjectDirectory(store.database, store.signals, store.clock)
        yield Shop(store, projects, other, made.text)
        await other.aclose()


async def test_a_project_binds_its_runs_together(shop: Shop) -> None:
    await shop.run("second")
    await shop.projects.limit("shop", UsageLimits(calls_per_minute=6, burst_seconds=20))
    await shop.call(shop.store.limits, "policy")
    await shop.call(shop.other_proxy, "second")
    with pytest.raises(RateLimited, match=r"the project 'shop' accepts 6 calls a minute \(project\.limits\.calls"):
        await shop.call(shop.store.limits, "second")
    assert shop.store.limited.refused == ["project.calls_per_minute"]
    shop.store.clock.now += 10.0
    await shop.call(shop.store.limits, "second")
    await shop.projects.limit("shop", UsageLimits())
    assert shop.store.limits.admission(await shop.store.runs.by_name("policy"), await shop.holder()) is None


async def test_a_key_binds_its_calls_alone(shop: Shop) -> None:
    holder = await shop.holder()
    await shop.store.credentials.change(holder.key_id, KeyChange(limits=UsageLimits(tokens_per_minute=60)))
    await shop.call(shop.store.limits, tokens=100)
    for limits in (shop.store.limits, shop.other_proxy):
        with pytest.raises(
            TokensLimited, match=r"the key 'ci' accepts 60 tokens a minute.*\(key\.limits\.tokens_per"
        ):
            await shop.call(limits)
    assert shop.store.limits.admission(shop.store.run, shop.store.owner) is None, "another key of the run"


async def test_keys_of_sessions_and_rotated_keys_are_counted_with_the_key_that_made_them(shop: Shop) -> None:
    """Otherwise whoever has a limited key could open sessions, or rotate it, to get a fresh allowance."""
    credentials = shop.store.credentials
    holder = await shop.holder()
    await credentials.change(holder.key_id, KeyChange(limits=UsageLimits(tokens_per_day=100)))
    (session,) = await shop.store.sessions.create(shop.store.run, SessionSpec(), limited_as=holder.limited_as)
    rotated = await credentials.rotate(holder.key_id, grace_seconds=60.0)
    (later,) = await shop.store.sessions.create(
        shop.store.run, SessionSpec(), limited_as=(await credentials.authenticate(rotated.key.text)).limited_as
    )
    texts = (shop.key, session.api_key, rotated.key.text, later.api_key)
    await shop.call(shop.store.limits, tokens=100)
    for text in texts:
        shop.key = text
        with pytest.raises(BudgetExhausted, match=r"the key '.*' has used its budget of 100 tokens a day"):
            await shop.call(shop.other_proxy)
    await credentials.change(rotated.key.id, KeyChange(limits=UsageLimits(tokens_per_day=1000)))
    for text in texts:
        shop.key = text
        await shop.call(shop.other_proxy)


async def test_a_budget_lasts_over_restarts_until_its_day_ends(shop: Shop) -> None:
    await shop.projects.limit("shop", UsageLimits(tokens_per_day=100, tokens_per_month=250))
    await shop.call(shop.store.limits, tokens=99)
    await shop.call(shop.other_proxy, tokens=30)
    shop.store.clock.now += 1.5  # a proxy learns within a second what others used
    for limits in (shop.store.limits, shop.other_proxy, Limits(shop.store.database, shop.store.clock)):
        with pytest.raises(BudgetExhausted) as refused:
            await shop.call(limits)
        assert refused.value.retry_after == 12 * 3600 - 1
        assert "'shop' has used its budget of 100 tokens a day" in refused.value.message
        assert "calls begin again at 2026-11-26 00:00 UTC, or once the budget is raised" in refused.value.message
    shop.store.clock.now += 12 * 3600.0
    await shop.call(shop.other_proxy, tokens=121)
    shop.store.clock.now += 86400.0
    with pytest.raises(BudgetExhausted, match=r"250 tokens a month .*2026-12-01 00:00 UTC"):
        await shop.call(shop.store.limits)
    shop.store.clock.now = datetime(2026, 12, 1, 0, 0, 1, tzinfo=UTC).timestamp()
    await shop.call(shop.store.limits)


async def test_an_exhausted_budget_is_one_event_of_the_run_whose_call_exhausted_it(shop: Shop) -> None:
    second = await shop.run("second")
    await shop.projects.limit("shop", UsageLimits(tokens_per_day=100))
    notified = shop.store.signals.events.count
    limits = Limits(shop.store.database, shop.store.clock, signals=shop.store.signals)
    await shop.call(limits, "policy", tokens=60)
    assert await shop.events("budget.exhausted") == []
    late = await shop.admission(shop.other_proxy)
    await late.to_begin()
    await shop.call(limits, "second", tokens=60)
    late.used(60)
    await shop.other_proxy.pay()
    for _ in range(2):
        with pytest.raises(BudgetExhausted):
            await shop.call(limits)
    data = {"scope": "project", "id": second.project_id, "name": "shop", "period": "day", "budget": 100, "used": 120}
    assert await shop.events("budget.exhausted") == [(second.id, data)]
    assert shop.store.signals.events.count == notified + 1
    await shop.projects.limit("shop", UsageLimits(tokens_per_day=200))
    await shop.call(limits, tokens=30)
    assert [found["used"] for _run, found in await shop.events("budget.exhausted")] == [120, 210], (
        "raised, used again"
    )
    shop.store.clock.now += 86400.0
    await shop.call(limits, tokens=500)
    assert [found["used"] for _run, found in await shop.events("budget.exhausted")] == [120, 210, 500]


async def test_a_refusal_by_one_limit_uses_nothing_of_the_others(shop: Shop) -> None:
    """The run permits 100 calls at once, its key one."""
    await shop.run(calls_per_minute=600)
    holder = await shop.holder()
    await shop.store.credentials.change(holder.key_id, KeyChange(limits=UsageLimits(calls_per_minute=1)))
    await shop.call(shop.store.limits)
    for _ in range(50):
        with pytest.raises(RateLimited, match="the key 'ci' accepts 1 calls"):
            await shop.call(shop.store.limits)
    (row,) = await shop.store.database.read(
        lambda connection: connection.execute(
            select(LimitLevelRow.due_at).where(LimitLevelRow.subject_id == shop.store.run.id)
        ).all()
    )
    assert row.due_at - shop.store.clock.now == pytest.approx(0.1, abs=1e-6), "one call of 600 a minute"


async def test_calls_at_once_are_granted_by_all_limits_or_none(shop: Shop) -> None:
    await shop.run(calls_per_minute=60)
    await shop.projects.limit("shop", UsageLimits(calls_per_minute=36, burst_seconds=10))
    outcomes = await asyncio.gather(*(shop.call(shop.store.limits) for _ in range(30)), return_exceptions=True)
    assert sum(outcome is None for outcome in outcomes) == 6, "the project's burst of ten seconds"
    assert all(outcome is None or isinstance(outcome, RateLimited) for outcome in outcomes)
    shop.store.clock.now += 100.0
    outcomes = await asyncio.gather(*(shop.call(shop.store.limits) for _ in range(30)), return_exceptions=True)
    assert sum(outcome is None for outcome in outcomes) == 6


async def test_tokens_stay_owed_while_the_store_is_away(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    await shop.projects.limit("shop", UsageLimits(tokens_per_day=100))
    await shop.call(shop.store.limits, tokens=10)

    async def away(*_args: object, **_options: object) -> None:
        raise StoreUnavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(shop.store.database, "commit", away)
        with pytest.raises(StoreUnavailable):
            await shop.call(shop.store.limits, tokens=80)
    await shop.call(shop.store.limits, tokens=5)
    (tokens,) = await shop.store.database.read(
        lambda connection: connection.execute(select(TokenBudgetRow.tokens)).scalars().all()
    )
    assert tokens == 95
