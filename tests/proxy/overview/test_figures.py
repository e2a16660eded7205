"""Whatever happens to a run, its figures equal a full recount: of now in a small store, of the last minute in a large
one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import ClaimId
from proxy.contract.states import Outcome, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.database.tables import PolicyVersionRow, SessionRow
from proxy.errors import StoreUnavailable
from proxy.feedback.service import FeedbackItem
from proxy.overview import figures, totals
from proxy.overview.curves import bucket_stride, reward_points
from proxy.overview.repository import OverviewRepository
from proxy.overview.service import OverviewService
from proxy.overview.views import REWARD_WINDOW, RewardPoint
from proxy.retention.erasing import EraseService, ErasureTarget
from proxy.sessions.opening import SessionSpec
from proxy.versions.service import VersionService
from tests.proxy.store import MovedClock, Store
from tests.proxy.versions.publishing import commit_request, inspector, publish


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures that need a walk over all sessions."""

    sessions: dict[str, int]
    turns: int
    last_activity_at: float | None
    swaps: int
    reward: tuple[RewardPoint, ...]


async def recounted(store: Store) -> Figures:
    """Count the figures from all rows."""
    sessions, versions = await store.database.read(
        lambda connection: [
            connection.execute(select(table.__table__)).all() for table in (SessionRow, PolicyVersionRow)
        ]
    )
    rewarded = sorted(
        (row.ended_at, row.id, row.reward)
        for row in sessions
        if row.ended_at is not None and row.reward is not None and row.purpose == "train"
    )
    stride = bucket_stride(len(sessions))
    parts = [rewarded[start : start + stride] for start in range(0, len(rewarded), stride)]
    buckets = [(len(part), part[-1][0], sum(reward for _, _, reward in part)) for part in parts]
    return Figures(
        sessions={state: sum(row.training == state for row in sessions) for state in TrainingState},
        turns=sum(row.turn_count for row in sessions),
        last_activity_at=max((row.last_active_at for row in sessions), default=None),
        swaps=sum(row.version > 0 and row.served_at is not None for row in versions),
        reward=reward_points(buckets, REWARD_WINDOW),
    )


async def shown_by(overview: OverviewService) -> Figures:
    run = await overview.run("policy")
    assert run.session_count == sum(run.sessions.values())
    return Figures(
        sessions=run.sessions,
        turns=run.turn_count,
        last_activity_at=run.last_activity_at,
        swaps=run.swaps,
        reward=(await overview.curves("policy")).reward,
    )


async def refreshed() -> None:
    """Wait for the refreshes that the overview has begun in the background."""
    tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith("refresh of figures")]
    await asyncio.gather(*tasks)


class History:
    """A run in which anything may happen."""

    def __init__(self, store: Store, directory: Path, seed: int) -> None:
        self._store = store
        self._directory = directory
        self._draw = random.Random(seed)
        parts: dict[str, Any] = {"database": store.database, "clock": store.clock, "signals": store.signals}
        self._claims = ClaimService(**parts)
        self._versions = VersionService(**parts, inspector=inspector())
        self._erasing = EraseService(store.database, store.runs, store.credentials, store.signals, store.clock)
        self._sessions: list[str] = []
        self._leased: list[ClaimId] = []
        self._head = 0
        self._steps: list[Callable[[], Awaitable[None]]] = [
            self._open, self._open, self._turn, self._turn, self._reward, self._reward, self._late_reward,
            self._end, self._claim, self._commit, self._commit, self._release, self._erase, self._sweep,
        ]  # fmt: skip

    async def advance(self) -> None:
        self._store.clock.now += self._draw.random()
        await self._draw.choice(self._steps)()

    def _any(self) -> str | None:
        return self._draw.choice(self._sessions) if self._sessions else None

    async def _open(self) -> None:
        spec = SessionSpec(purpose=self._draw.choice((Purpose.TRAIN, Purpose.TRAIN, Purpose.TRAIN, Purpose.EVAL)))
        self._sessions += [session.id for session in await self._store.sessions.create(self._store.run, spec, 2)]

    async def _turn(self) -> None:
        if (session := self._any()) is not None:
            await self._store.add_turn(session)

    async def _reward(self) -> None:
        if (session := self._any()) is not None:
            await self._store.add_turn(session)
            await self._post(session)

    async def _late_reward(self) -> None:
        if (session := self._any()) is not None:
            await self._post(session)

    async def _post(self, session: str) -> None:
        item = FeedbackItem(entries=(("reward", self._draw.choice((0.0, 0.5, 1.0))),), session_id=session)
        await self._store.feedback.record(self._store.owner, [item])

    async def _end(self) -> None:
        if (session := self._any()) is not None:
            await self._store.sessions.end(self._store.owner, session, self._draw.choice(list(Outcome)))

    async def _claim(self) -> None:
        batch = await self._claims.claim(self._store.run, ClaimRequest(trainer="t", want=3, max_staleness=1000))
        if batch.claim_id is not None:
            self._leased.append(batch.claim_id)

    async def _commit(self) -> None:
        if self._leased:
            request = commit_request([self._leased.pop()], self._head, publish(self._directory))
            self._head = (await self._versions.commit(self._store.run, request)).version

    async def _release(self) -> None:
        if self._leased:
            await self._claims.release(self._store.run, self._leased.pop())

    async def _erase(self) -> None:
        if (session := self._any()) is not None and self._draw.random() < 0.3:
            self._sessions.remove(session)
            await self._erasing.erase(ErasureTarget(session=session))

    async def _sweep(self) -> None:
        self._store.clock.now += self._draw.choice((0.0, 0.0, 2 * self._store.run.settings.reward_timeout_seconds))
        await self._store.sessions.sweep()
        await self._claims.expire()
        self._leased.clear()


@pytest.mark.parametrize("seed", range(3))
async def test_figures_of_a_small_store_equal_a_recount(store: Store, tmp_path: Path, seed: int) -> None:
    history = History(store, tmp_path, seed)
    overview = OverviewService(
        database=store.database, clock=store.clock, signals=store.signals, hold_seconds=0.0, elapsed=MovedClock()
    )
    for _ in range(12):
        for _ in range(6):
            await history.advance()
        assert await shown_by(overview) == await recounted(store)
        by_training = {state: count for (_, state), count in (await overview.sessions_by_training()).items()}
        assert by_training == {state: count for state, count in (await shown_by(overview)).sessions.items() if count}


@pytest.mark.parametrize("seed", range(3))
async def test_figures_of_a_large_store_are_at_most_a_minute_old(
    store: Store, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (figures, totals):
        monkeypatch.setattr(module, "LARGE", 2)
    history, elapsed, draw = History(store, tmp_path, seed), MovedClock(), random.Random(seed)
    overview = OverviewService(database=store.database, clock=store.clock, signals=store.signals, elapsed=elapsed)
    seen = [(elapsed.now, await recounted(store))]
    for _ in range(40):
        await history.advance()
        elapsed.now += draw.choice((0.0, 0.4, 5.0, 70.0))
        seen.append((elapsed.now, await recounted(store)))
        shown = await shown_by(overview)
        await refreshed()
        young = [then for at, then in seen if at >= elapsed.now - 60.0]
        for name in Figures.__struct_fields__:
            assert getattr(shown, name) in [getattr(then, name) for then in young], name
    elapsed.now += 61.0
    assert await shown_by(overview) == await recounted(store)
    overview.close()


async def test_regular_refreshes_spare_requests_the_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a refresh every half minute, only the first request waits for a walk over all sessions."""
    for module in (figures, totals):
        monkeypatch.setattr(module, "LARGE", 0)
    elapsed = MovedClock()
    overview = OverviewService(database=store.database, clock=store.clock, signals=store.signals, elapsed=elapsed)
    await store.sessions.create(store.run, SessionSpec())
    await overview.refresh_figures()
    walks = 0
    counted = OverviewRepository.counted

    def walk(repository: OverviewRepository) -> Any:
        nonlocal walks
        walks += 1
        return counted(repository)

    monkeypatch.setattr(OverviewRepository, "counted", walk)
    for _ in range(20):
        elapsed.now += 30.0
        await overview.refresh_figures()
        await refreshed()
    assert walks == 20

    def unavailable(_repository: OverviewRepository) -> Any:
        raise StoreUnavailable("a request waits for this walk")

    monkeypatch.setattr(OverviewRepository, "counted", unavailable)
    elapsed.now += 59.0
    assert (await overview.run("policy")).session_count == 1
    await refreshed()
    overview.close()
