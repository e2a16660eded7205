"""Whatever happens to a run, its figures are those of a full recount: at once in a small store, and in a large one of
a state that is a minute old at most."""

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
from proxy.feedback.service import FeedbackItem
from proxy.overview import figures
from proxy.overview.assembly import bucket_stride, reward_points
from proxy.overview.service import OverviewService
from proxy.overview.views import REWARD_WINDOW, RewardPoint
from proxy.retention.erasing import EraseService, ErasureTarget
from proxy.sessions.opening import SessionSpec
from proxy.versions.service import VersionService
from tests.proxy.store import MovedClock, Store
from tests.proxy.versions.publishing import commit_request, inspector, publish


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What takes a walk over all sessions to know."""

    sessions: dict[str, int]
    turns: int
    last_activity_at: float | None
    swaps: int
    reward: tuple[RewardPoint, ...]


async def recounted(store: Store) -> Figures:
    """By going through all rows."""
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


async def told(overview: OverviewService) -> Figures:
    run = await overview.run("policy")
    assert run.session_count == sum(run.sessions.values())
    return Figures(
        sessions=run.sessions,
        turns=run.turn_count,
        last_activity_at=run.last_activity_at,
        swaps=run.swaps,
        reward=(await overview.curves("policy")).reward,
    )


async def made(overview: OverviewService) -> None:
    """Waits for what is being made for nobody in particular."""
    await asyncio.gather(*overview._figures._remembered._under_way.values())


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

    async def go_on(self) -> None:
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
async def test_in_a_small_store_figures_are_those_of_a_recount(store: Store, tmp_path: Path, seed: int) -> None:
    history = History(store, tmp_path, seed)
    overview = OverviewService(
        database=store.database, clock=store.clock, signals=store.signals, hold_seconds=0.0, elapsed=MovedClock()
    )
    for _ in range(12):
        for _ in range(6):
            await history.go_on()
        assert await told(overview) == await recounted(store)
        by_training = {state: count for (_, state), count in (await overview.sessions_by_training()).items()}
        assert by_training == {state: count for state, count in (await told(overview)).sessions.items() if count}


@pytest.mark.parametrize("seed", range(3))
async def test_in_a_large_one_they_are_a_minute_old_at_most(
    store: Store, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "LARGE", 2)
    history, elapsed, draw = History(store, tmp_path, seed), MovedClock(), random.Random(seed)
    overview = OverviewService(database=store.database, clock=store.clock, signals=store.signals, elapsed=elapsed)
    seen = [(elapsed.now, await recounted(store))]
    for _ in range(40):
        await history.go_on()
        elapsed.now += draw.choice((0.0, 0.4, 5.0, 70.0))
        seen.append((elapsed.now, await recounted(store)))
        shown = await told(overview)
        await made(overview)
        young = [then for at, then in seen if at >= elapsed.now - 60.0]
        for name in Figures.__struct_fields__:
            assert getattr(shown, name) in [getattr(then, name) for then in young], name
    elapsed.now += 61.0
    assert await told(overview) == await recounted(store)
    overview.close()


async def test_who_looks_ahead_saves_others_the_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a look every half minute, no answer is ever waited for but the first."""
    monkeypatch.setattr(figures, "LARGE", 0)
    elapsed = MovedClock()
    overview = OverviewService(database=store.database, clock=store.clock, signals=store.signals, elapsed=elapsed)
    await store.sessions.create(store.run, SessionSpec())
    await overview.refresh_figures()
    walks = 0
    totals = overview._figures._totals

    async def counted() -> Any:
        nonlocal walks
        walks += 1
        return await totals()

    monkeypatch.setattr(overview._figures, "_totals", counted)
    for _ in range(20):
        elapsed.now += 30.0
        await overview.refresh_figures()
        await made(overview)
    assert walks == 20
    monkeypatch.setattr(overview._figures, "_totals", asyncio.Event().wait)
    elapsed.now += 59.0
    assert (await overview.run("policy")).session_count == 1
    overview.close()
