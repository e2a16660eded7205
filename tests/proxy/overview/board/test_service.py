from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, event

from proxy.overview.board.service import MAX_POINTS, condensed
from tests.fakes.run_history import NOW, add_history, add_run, add_session
from tests.proxy.overview.site import Site


async def test_a_glance_agrees_with_the_summary_of_the_run(site: Site, run_id: str) -> None:
    await add_run(site.database, name="empty", now=NOW - 10)
    empty, glance = await site.overview.board.glances()
    summary = await site.overview.run(run_id)
    for name in ("name", "state", "base_model", "head_version", "serving_version", "session_count", "staleness_mean"):
        assert getattr(glance, name) == getattr(summary, name), name
    assert glance.waiting == summary.sessions["ready"]
    assert glance.last_activity_at == summary.last_activity_at
    assert glance.mean_reward == pytest.approx(summary.mean_reward)
    assert len(glance.rewards) == MAX_POINTS - 7  # 100 rewards in groups of four
    assert (empty.name, empty.rewards, empty.mean_reward, empty.staleness_mean) == ("empty", (), None, None)


async def test_rewards_are_the_last_ones_oldest_first(site: Site) -> None:
    run_id = await add_run(site.database)
    for number in range(4):
        await add_session(site.database, run_id, now=NOW + number, reward=number / 4)
    await add_session(site.database, run_id, now=NOW + 9, reward=9.0, purpose="eval")
    (glance,) = await site.overview.board.glances()
    assert glance.rewards == (0.0, 0.25, 0.5, 0.75)


async def test_archived_runs_are_shown_on_demand(site: Site) -> None:
    for name in ("old", "new"):
        await add_history(site.database, await add_run(site.database, name=name), steps=1, per_step=2)
    await site.switch.archive("old")
    assert [run.name for run in await site.overview.board.glances()] == ["new"]
    shown = {run.name: run for run in await site.overview.board.glances(with_archived=True)}
    assert (shown["old"].state, bool(shown["old"].rewards)) == ("archived", True)


async def test_the_number_of_queries_does_not_grow_with_the_runs(site: Site) -> None:
    statements: list[str] = []

    def note(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if connection.engine.url.database == site.database.url.database:
            statements.append(statement)

    counts = []
    event.listen(Engine, "before_cursor_execute", note)
    try:
        for runs in (1, 12):
            for number in range(runs):
                run_id = await add_run(site.database, name=f"r{runs}-{number}")
                await add_history(site.database, run_id, steps=1, per_step=2)
            statements.clear()
            await site.overview.board.glances()
            counts.append(len([text for text in statements if text.lstrip().startswith("SELECT")]))
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert counts[0] == counts[1] <= 6


@given(st.lists(st.floats(-1e6, 1e6), max_size=300))
def test_condensed_rewards_keep_bounds_and_the_newest(rewards: list[float]) -> None:
    points = condensed(rewards)
    assert len(points) <= MAX_POINTS
    assert bool(points) == bool(rewards)
    if len(rewards) <= MAX_POINTS:
        assert list(points) == rewards
    for point in points:
        assert min(rewards) - 1e-6 <= point <= max(rewards) + 1e-6
