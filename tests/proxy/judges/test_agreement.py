from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.feedback.service import FeedbackItem
from proxy.judges.agreement import agreement_of
from proxy.lifecycle.drift import WINDOW, drift_of
from proxy.overview.health import HealthCheck
from tests.database import sqlite_database
from tests.proxy.judges.model_server import grade
from tests.proxy.judges.world import World, open_world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(sqlite_database(tmp_path)) as opened:
        yield opened


def test_agreement_of_known_pairs() -> None:
    pairs = [(0.9, 1.0), (0.8, 1.0), (0.7, 0.0), (0.2, 0.0), (0.1, 0.0), (0.3, 1.0)]
    found = agreement_of(pairs, low=0, high=1)
    # Four of six agree, and half would by chance.
    assert found.kappa == pytest.approx(1 / 3)
    assert found.correlation == pytest.approx(0.5 / (0.58 * 1.5) ** 0.5)
    assert found.mean_difference == pytest.approx(0)
    assert [(bucket.count, bucket.people_mean) for bucket in found.calibration] == [(1, 0), (2, 0.5), (1, 0), (2, 1)]
    assert agreement_of(pairs[:4], low=0, high=1).correlation is None
    constant = agreement_of([(0.5, 1.0)] * 6, low=0, high=1)
    assert (constant.pairs, constant.correlation, constant.kappa) == (6, None, None)


def test_drift_of_a_mean_and_of_a_spread() -> None:
    steady = [0.4, 0.6] * WINDOW
    assert drift_of(steady) is None
    assert drift_of(steady[:WINDOW]) is None
    assert "mean went from 0.5 to 0.9" in str(drift_of(steady[:WINDOW] + [0.8, 1.0] * (WINDOW // 2)))
    assert "spread went from 0.1 to 0" in str(drift_of(steady[:WINDOW] + [0.5] * WINDOW))


async def test_scores_are_compared_with_peoples_rewards_of_the_same_sessions(world: World) -> None:
    for number in range(6):
        world.model.answers = [grade(number / 10)]
        session_id = await world.session()
        await world.run_jobs()
        entries = (("thumbs", 0.0),) if number == 0 else (("thumbs", 0.0), ("thumbs", number / 10))
        for entry in entries:
            item = FeedbackItem(entries=(entry,), session_id=session_id, source="person")
            await world.store.feedback.record(world.store.owner, [item])
    run = await world.run()
    found = await world.judges.agreement(run, "taste", "person")
    assert found.pairs == 6
    assert found.correlation == pytest.approx(1.0)
    assert (await world.judges.agreement(run, "taste", "nobody")).pairs == 0


async def test_sources_to_compare_with_are_those_that_are_no_judges(database_url: str) -> None:
    async with open_world(database_url) as world:
        session_id = await world.session()
        assert await world.judges.unscored(await world.run(), "taste") == 1
        await world.run_jobs()
        assert await world.judges.unscored(await world.run(), "taste") == 0
        for source in ("reviewer:ada", "api", "Zoe"):
            item = FeedbackItem(entries=(("reward", 1.0),), session_id=session_id, source=source)
            await world.store.feedback.record(world.store.owner, [item])
        assert {one.source for one in await world.rewards()} > {"judge:taste"}
        assert sorted(await world.judges.sources(await world.run())) == ["Zoe", "api", "reviewer:ada"]


async def test_a_drifting_judge_is_a_problem_of_health(world: World) -> None:
    sessions = [await world.session() for _ in range(2 * WINDOW)]
    health = HealthCheck(database=world.store.database, clock=world.store.clock, engines=None, data_dir=None)

    async def of_its_time(_body: object) -> str:
        # The first half swings about 0.2, the second about 0.8.
        number = len(world.model.requests)
        return grade((0.2 if number <= WINDOW else 0.8) + 0.05 * (number % 2))

    world.model.answers = [of_its_time]
    world.store.clock.now += 1
    while await world.run_jobs():
        world.store.clock.now += 1
    assert len(await world.rewards()) == len(sessions)
    (problem,) = (await health.check()).problems
    assert "the judge 'taste' of the run 'policy' has drifted: its mean went from 0.2" in problem
    (view,) = await world.judges.list_(await world.run())
    assert "mean went from" in str(view.drift)
