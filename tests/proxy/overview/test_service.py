from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select, update

from proxy.contract.identifiers import least_turn_id, new_reward_id
from proxy.database.tables import ClaimRow, EventRow, RewardRow, RunRow, SessionRow, TurnRow
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.lifecycle.events import append_event
from proxy.lifecycle.lifecycle import settle
from proxy.overview.filters import SessionFilter
from proxy.overview.rate import RateHistory
from proxy.overview.rewards.views import RewardFilter
from proxy.overview.views import Snapshot
from proxy.versions.withdrawal_repository import WithdrawalRepository
from tests.fakes.run_history import NOW, add_run, add_session
from tests.proxy.overview.site import Site


async def _one(site: Site, *columns: Any, where: Any) -> Any:
    return await site.database.read(
        lambda connection: connection.execute(select(*columns).where(where).limit(1)).first()
    )


async def _reward(site: Site, session_id: str, run_id: str, value: float, **values: Any) -> str:
    reward_id = new_reward_id()
    row = {"run_id": run_id, "session_id": session_id, "name": "reward", "value": value, "source": "checker"}
    row |= {"id": reward_id, "after_training": False, "created_at": NOW} | values
    await site.database.commit(lambda connection: connection.execute(insert(RewardRow).values(row)))
    return reward_id


async def test_a_run_at_a_glance(site: Site, run_id: str) -> None:
    run = await site.overview.run("calculator")
    assert run == await site.overview.run(run_id)
    assert run.sessions == {
        "pending": 3, "ready": 3, "leased": 0, "consumed": 96, "stale": 1, "expired": 1, "excluded": 2,
    }  # fmt: skip
    assert run.session_count == 106
    assert run.open_sessions == 2
    assert run.head_version == run.serving_version == 6
    assert run.swaps == 6
    assert run.turn_count == 106 * 3
    assert run.reward_count == 100
    assert run.staleness_max == 2
    assert (run.inexact_share, run.unattributed_share) == (0.0, 0.0)
    assert run.last_activity_at == pytest.approx(NOW - 0.4)


async def test_the_mean_reward_is_of_the_last_128_ended_training_sessions(site: Site) -> None:
    run_id = await add_run(site.database)
    for index in range(130):
        await add_session(site.database, run_id, now=NOW + index, reward=100.0 if index < 2 else float(index % 2))
    await add_session(site.database, run_id, now=NOW + 200, reward=50.0, purpose="eval")
    run = await site.overview.run(run_id)
    assert (run.mean_reward, run.reward_count) == (0.5, 128)


async def test_an_empty_run_has_no_figures_rather_than_zeros(site: Site) -> None:
    run_id = await add_run(site.database)
    run = await site.overview.run(run_id)
    assert (run.mean_reward, run.staleness_mean, run.last_activity_at) == (None, None, None)
    assert (run.inexact_share, run.unattributed_share) == (None, None)
    curves = await site.overview.curves(run_id)
    assert (curves.reward, curves.rate) == ((), ())
    assert [step.version for step in curves.steps] == [0]


async def test_calls_that_named_nothing_are_a_share_of_the_recent_ones(site: Site) -> None:
    run_id = await add_run(site.database)
    first, *_ = [await add_session(site.database, run_id, now=NOW + index) for index in range(4)]
    named_nothing = update(TurnRow).where(TurnRow.session_id == first).values(attributed_by="new")
    await site.database.commit(lambda connection: connection.execute(named_nothing))
    assert (await site.overview.run(run_id)).unattributed_share == 0.25


async def test_the_rate_counts_output_tokens_since_the_first_of_the_last_minute(site: Site) -> None:
    run_id = await add_run(site.database)
    await add_session(site.database, run_id, now=NOW - 20)
    turn = await _one(site, TurnRow.output_logprobs, TurnRow.finished_at, where=TurnRow.run_id == run_id)
    history = RateHistory(run_id)
    await history.update(site.database, NOW)
    width = history.WIDTH_S
    begin = turn.finished_at // width * width
    assert history.last_minute(NOW) == pytest.approx(len(turn.output_logprobs) / 4 / (NOW - begin))
    assert history.last_minute(NOW + 120) == 0.0
    points = history.points(NOW)
    assert points[0].tokens_per_second == len(turn.output_logprobs) / 4 / width
    assert sum(point.tokens_per_second for point in points[1:]) == 0.0


async def test_a_rate_read_again_sees_what_came_since_and_keeps_what_was(site: Site) -> None:
    run_id = await add_run(site.database)
    await add_session(site.database, run_id, now=NOW - 100)
    kept, fresh = RateHistory(run_id), RateHistory(run_id)
    await kept.update(site.database, NOW - 50)
    await add_session(site.database, run_id, now=NOW - 40)
    await kept.update(site.database, NOW)
    await fresh.update(site.database, NOW)
    assert kept.points(NOW) == fresh.points(NOW)
    assert sum(point.tokens_per_second > 0 for point in fresh.points(NOW)) == 2


async def _add_turns(site: Site, run_id: str, begins: Sequence[float], seconds: float) -> None:
    """Add a turn that began at each of these times and took this long."""
    turn = await _one(site, *TurnRow.__table__.c, where=TurnRow.run_id == run_id)
    rows = [
        {**turn._mapping, "id": least_turn_id(begin), "started_at": begin, "finished_at": begin + seconds}
        for begin in begins
    ]
    await site.database.commit(lambda connection: connection.execute(insert(TurnRow), rows))


async def test_a_rate_reads_a_bounded_number_of_turns_and_shows_complete_intervals(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await add_run(site.database)
    await add_session(site.database, run_id, now=NOW - 100_000)
    await site.database.commit(
        lambda connection: connection.execute(update(TurnRow).values(id=least_turn_id(NOW - 100_000), parent_id=None))
    )
    whole, bounded = RateHistory(run_id), RateHistory(run_id)
    monkeypatch.setattr(bounded, "TURNS", 80)
    shown: list[int] = []
    begin = NOW
    for seconds in (100, 10, 5, 100, 30, 15):  # between queries; 80 turns reach back 40 seconds
        await _add_turns(site, run_id, [begin + index / 2 for index in range(2 * seconds)], seconds=1.5)
        begin += seconds
        now = begin + 2
        await whole.update(site.database, now)
        await bounded.update(site.database, now)
        known = {point.at: point.tokens_per_second for point in whole.points(now)}
        assert all(known[point.at] == point.tokens_per_second for point in bounded.points(now))
        assert bounded.last_minute(now) == pytest.approx(whole.last_minute(now), rel=0.1)
        shown.append(len(bounded.points(now)))
    # Turns read before stay, unless more arrive between two queries than one reads.
    assert shown == [5, 7, 8, 5, 5, 8]


async def test_a_revised_reward_shows_on_ledger_session_step_and_run(site: Site, run_id: str) -> None:
    (item,) = (
        await site.overview.sessions(run_id, SessionFilter(training="consumed", min_reward=1.0), limit=1)
    ).sessions
    assert item.consumed_by is not None
    late = await _reward(site, item.id, run_id, 0.25, after_training=True)
    await site.database.commit(lambda connection: settle(connection, [item.id], now=NOW))
    view = await site.overview.session(item.id)
    assert view.trained is not None
    assert (view.trained.reward_then, view.trained.reward_now, view.trained.revised) == (1.0, 0.25, True)
    assert [(reward.superseded, reward.after_training) for reward in view.rewards] == [(True, False), (False, True)]
    step = await site.overview.step(run_id, item.consumed_by)
    assert step.rewards_revised == 1
    (revised,) = [entry for entry in step.trajectories if entry.revised]
    assert (revised.audit.session_id, revised.audit.reward, revised.reward_now) == (item.id, 1.0, 0.25)
    run = await site.overview.run(run_id)
    assert (run.late_rewards, run.revised_sessions) == (1, 1)
    assert (await site.overview.run(run_id)).late_rewards == 1  # counted once, however often requested
    page = await site.overview.ledger.page(run_id, RewardFilter(), limit=1)
    assert [(reward.id, reward.superseded) for reward in page.rewards] == [(late, False)]


async def test_the_ledger_comes_page_by_page_each_entry_once(site: Site, run_id: str) -> None:
    seen: list[int] = []
    cursor: str | None = None
    while True:
        page = await site.overview.ledger.page(run_id, RewardFilter(), cursor=cursor, limit=30)
        seen.extend(reward.sequence for reward in page.rewards)
        cursor = page.next_cursor
        if cursor is None:
            break
    assert len(seen) == len(set(seen)) == 101


async def test_steps_come_newest_first_with_what_they_trained_on(site: Site, run_id: str) -> None:
    first = await site.overview.steps(run_id, limit=4)
    rest = await site.overview.steps(run_id, cursor=first.next_cursor, limit=4)
    assert [step.version for step in (*first.steps, *rest.steps)] == [6, 5, 4, 3, 2, 1, 0]
    assert rest.next_cursor is None
    assert first.steps[0].trajectories == 16
    assert first.steps[0].weights is not None
    assert rest.steps[-1].weights is None
    view = await site.overview.step(run_id, 6)
    assert view.step == first.steps[0]
    assert len(view.trajectories) == 16


async def test_curves_hold_every_rewarded_session_and_every_version(site: Site, run_id: str) -> None:
    curves = await site.overview.curves(run_id)
    assert curves.reward[-1].sessions == 100
    assert [point.at for point in curves.reward] == sorted(point.at for point in curves.reward)
    assert [step.version for step in curves.steps] == list(range(7))
    run = await site.overview.run(run_id)
    assert curves.reward[-1].moving_mean == pytest.approx(run.mean_reward)


@pytest.mark.parametrize("cursor", ["x", "-1", "0x1p0~abc"])
async def test_invented_cursors_are_refused(site: Site, run_id: str, cursor: str) -> None:
    with pytest.raises(InvalidRequest):
        await site.overview.ledger.page(run_id, RewardFilter(), cursor=cursor)
    with pytest.raises(InvalidRequest):
        await site.overview.steps(run_id, cursor=cursor)


async def test_missing_objects_are_404(site: Site, run_id: str) -> None:
    for missing in (
        site.overview.run("other"),
        site.overview.session("ses_none"),
        site.overview.turn("turn_none"),
        site.overview.step(run_id, 99),
    ):
        with pytest.raises(NotFound):
            await missing


async def test_pausing_is_logged_once_and_an_archived_run_stays_so(site: Site, run_id: str) -> None:
    for _ in range(2):
        assert await site.switch.pause(run_id) == "calculator"
        assert (await site.overview.run("calculator")).state == "paused"
    await site.switch.resume("calculator")
    assert (await site.overview.run("calculator")).state == "active"
    newest = select(EventRow.kind).order_by(EventRow.id.desc()).limit(3)
    kinds = await site.database.read(lambda connection: connection.execute(newest).scalars().all())
    assert kinds == ["run.resumed", "run.paused", "version.served"]
    await site.database.commit(lambda connection: connection.execute(update(RunRow).values(state="archived")))
    with pytest.raises(Conflict):
        await site.switch.resume("calculator")


async def test_health_reports_problems(site: Site, run_id: str) -> None:
    health = await site.overview.health()
    assert (health.ready, health.database, health.engine_ready) == (True, "ok", True)
    assert health.disk_free_bytes is not None
    (run,) = health.runs
    assert run.trainer == "active"
    site.serving.ready, site.serving.lines = False, ["the engine http://engine:30000 accepts no calls: it is down"]
    health = await site.overview.health()
    assert (health.ready, health.status) == (False, "degraded")
    assert any("engine" in problem for problem in health.problems)


async def test_health_reports_a_rejected_version_until_a_newer_one_exists(site: Site, run_id: str) -> None:
    (before,) = (await site.overview.health()).runs
    newest = before.head_version
    await site.database.commit(
        lambda connection: WithdrawalRepository(connection).reject(
            run_id, newest, "w has values that are not finite", now=NOW
        )
    )
    health = await site.overview.health()
    (run,) = health.runs
    assert (run.rejected_version, run.rejected_because) == (newest, "w has values that are not finite")
    assert run.head_version < newest
    assert health.status == "degraded"
    assert any("was rejected and is not served: w has values that are not finite" in each for each in health.problems)
    await site.switch.archive(run_id)
    assert not any("was rejected" in problem for problem in (await site.overview.health()).problems)
    await site.switch.unarchive(run_id)
    await site.database.commit(lambda connection: connection.execute(update(RunRow).values(head_version=newest + 1)))
    assert (await site.overview.health()).runs[0].rejected_version is None


async def test_a_trainer_that_stays_away_is_missed_only_when_something_waits(site: Site, run_id: str) -> None:

    def work(connection: Connection) -> None:
        connection.execute(update(ClaimRow).values(lease_expires_at=NOW - 500, created_at=NOW - 900))
        connection.execute(update(SessionRow).where(SessionRow.training == "ready").values(ready_at=NOW - 300))

    await site.database.commit(work)
    health = await site.overview.health()
    assert health.runs[0].trainer == "away"
    assert health.runs[0].trainer_seen_at == NOW - 620
    assert any("calculator" in problem for problem in health.problems)
    await site.switch.pause(run_id)
    assert (await site.overview.health()).runs[0].trainer == "idle"


async def test_snapshots_come_at_once_and_when_something_changes_and_end_with_close(site: Site, run_id: str) -> None:
    stream = site.overview.snapshots(run_id)
    first = await anext(stream)
    assert isinstance(first, Snapshot)
    assert first.run.name == "calculator"
    assert len(first.events) == 13
    await _log(site, run_id, "run.noted")
    site.signals.events.notify()
    second = await asyncio.wait_for(anext(stream), 60)
    assert isinstance(second, Snapshot)
    assert [event.kind for event in second.events] == ["run.noted"]
    assert second.last_event_id == first.last_event_id + 1
    site.overview.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(stream), 60)


async def test_a_reconnecting_client_gets_only_the_events_that_it_missed(site: Site, run_id: str) -> None:
    await _log(site, run_id, "one")
    seen = await site.database.read(
        lambda connection: connection.execute(select(EventRow.id).order_by(EventRow.id.desc()).limit(1)).scalar_one()
    )
    await _log(site, run_id, "two")
    stream = site.overview.snapshots(run_id, after=seen)
    snapshot = await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert snapshot is not None
    assert [event.kind for event in snapshot.events] == ["two"]


async def _log(site: Site, run_id: str, kind: str) -> None:
    await site.database.commit(
        lambda connection: append_event(connection, run_id=run_id, kind=kind, data={}, now=NOW)
    )
