"""Why a run has not learnt, derived from the store and its trainer's requests."""

from __future__ import annotations

from pathlib import Path

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.feedback.service import FeedbackItem
from proxy.overview.service import OverviewService
from proxy.runs.asking import AskedBatches
from proxy.sessions.opening import SessionSpec
from tests.proxy.store import MovedClock, Store


async def test_a_new_run_reports_what_it_waits_for_step_by_step(store: Store, tmp_path: Path) -> None:
    asked = AskedBatches()
    claims = ClaimService(database=store.database, clock=store.clock, signals=store.signals, asked=asked)
    overview = OverviewService(
        database=store.database,
        clock=store.clock,
        signals=store.signals,
        data_dir=tmp_path,
        hold_seconds=0.0,
        elapsed=MovedClock(),
        asked=asked,
    )

    async def reasons() -> list[str]:
        return list((await overview.run("policy")).not_learnt_because)

    assert await reasons() == ["no agent has made a call yet"]
    (session,) = await store.sessions.create(store.run, SessionSpec())
    await store.add_turn(session.id)
    assert await reasons() == ["no session has a reward yet (1 is open): post one number per session to /v1/feedback"]
    item = FeedbackItem(entries=(("reward", 1.0),), session_id=session.id)
    await store.feedback.record(store.owner, [item])
    assert [reason[:37] for reason in await reasons()] == ["no trainer is asking for trajectories"]
    assert (await overview.health()).runs[0].trainer == "never"
    await claims.claim(store.run, ClaimRequest(trainer="t", want=64, at_least=64))
    assert [reason[:49] for reason in await reasons()] == ["1 of 64 trajectories of the first batch are ready"]
    assert (await overview.health()).runs[0].trainer == "active"
    await claims.claim(store.run, ClaimRequest(trainer="t", want=1))
    assert await reasons() == ["the first training step is under way"]
    store.clock.now += 1000.0
    assert any(reason.startswith("no trainer is asking") for reason in await reasons())
    overview.close()
