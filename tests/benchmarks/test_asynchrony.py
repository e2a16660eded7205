"""Test how `make bench-async` evaluates its measurements, and how its agents work."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.asynchrony.agents import BATCH, MEMBERS, WINDOW, Agents
from benchmarks.asynchrony.report import judged, shown, summary, verdict
from benchmarks.asynchrony.run import step_figures


def found(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "seconds": 100.0,
        "seconds_to_090": 60.0,
        "sessions": 640,
        "trajectories_per_second": 6.4,
        "final": 0.95,
        "versions": 10,
        "trainer_idle_ratio": 0.5,
        "engine_idle_ratio": 0.25,
    }
    return {**values, **changes}


def test_the_speedup_is_the_median_of_the_seeds_and_none_if_one_never_arrived() -> None:
    sync = [found(seconds_to_090=seconds) for seconds in (90.0, 60.0, 100.0)]
    fast = [found(seconds_to_090=seconds, final=0.94) for seconds in (30.0, 30.0, 10.0)]
    result = summary(sync, fast)
    assert (result["speedup"], result["final_sync"], result["final_async"]) == (3.0, 0.95, 0.94)
    assert result["trainer_idle_ratio"] == {"sync": 0.5, "async": 0.5}
    assert all(target.reached for target in judged(result))
    never = summary(sync, [*fast[:2], found(seconds_to_090=None, final=0.5)])
    assert never["speedup"] is None
    assert [target.reached for target in judged(never)] == [False, False]
    assert "0.9 never" in shown(never)
    assert verdict(never).count("NOT REACHED") == 2


def test_idle_ratios_count_steps_by_their_length() -> None:
    def step(idle: float, seconds: float, **others: float) -> dict[str, Any]:
        told = {"trainer_idle_ratio": idle, "seconds_claim": idle * seconds, "seconds_update": (1 - idle) * seconds}
        return {"metrics": {**told, "staleness_max": 1.0, "skipped_stale": 0.0, **others}}

    figures = step_figures([step(1.0, 3.0, engine_idle_ratio=0.2), step(0.0, 1.0), {"metrics": {"loss": 1.0}}])
    assert (figures["versions"], figures["trainer_idle_ratio"], figures["engine_idle_ratio"]) == (2, 0.75, 0.2)
    assert step_figures([])["trainer_idle_ratio"] is None


class Counted(Agents):
    """A task without a server: each attempt takes a few turns of the event loop, and is counted while it runs."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", "key", seed=0, median=0.0, sigma=0.0)
        self.at_work = self.most = self.opened = 0

    async def _group(self) -> Any:
        self.opened += MEMBERS
        return [(None, None, number) for number in range(MEMBERS)]

    async def _attempt(self, session: Any, problem: Any, delay: Any, goal: float) -> None:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        for _ in range(1 + 3 * delay):
            await asyncio.sleep(0)
        self.at_work -= 1
        self.sessions += 1


async def test_batches_end_before_the_next_begins() -> None:
    agents, after = Counted(), []

    async def learnt() -> None:
        after.append((agents.at_work, agents.sessions))

    await agents.batches(3, 0.9, learnt)
    assert after == [(0, BATCH), (0, 2 * BATCH), (0, 3 * BATCH)]
    await agents.aclose()


async def test_a_stream_always_has_exactly_one_batch_in_progress() -> None:
    agents = Counted()
    await agents.stream(5, 0.9)
    assert (agents.sessions, agents.opened, agents.most) == (5 * BATCH, 5 * BATCH, BATCH)
    await agents.aclose()


async def test_the_reward_is_the_mean_of_a_full_window() -> None:
    agents = Counted()
    agents.rewards.extend([0.0] * 3 + [1.0] * (WINDOW - 3))
    assert agents.reward == pytest.approx(1 - 3 / WINDOW)
    await agents.aclose()
