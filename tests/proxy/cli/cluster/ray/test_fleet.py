"""The groups of a run, without Ray: each is a task that ends when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.cluster.ray.fleet import Fleet
from proxy.cli.cluster.ray.plan import Group
from proxy.cli.cluster.ray.scaling import LoadRule, WantedEngines
from proxy.cli.supervisor import PartFailed
from proxy.settings import load_settings

TRAINER = Group(name="shop-trainer", bundles=(), members=())


class Groups:
    """Stands for the actors: `running` has the groups whose processes run."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.draining: set[str] = set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.by_itself: dict[str, asyncio.Future[None]] = {}

    async def keep(self, group: Group) -> None:
        self.running.add(group.name)
        ended = self.by_itself[group.name] = asyncio.get_running_loop().create_future()
        try:
            await ended
        except asyncio.CancelledError:
            self.draining.add(group.name)
            await self.may_end.wait()
            raise
        finally:
            self.running.discard(group.name)
            self.draining.discard(group.name)


def fleet(groups: Groups, place: Path, rows: list[dict[str, Any]], trainer: Group | None = TRAINER) -> Fleet:
    async def listed() -> list[dict[str, Any]]:
        return rows

    settings = {"max_engines": 2, "idle_seconds": 0.001}
    return Fleet(
        engine=lambda number: Group(name=f"shop-ray-{number}", bundles=(), members=()),
        trainer=trainer,
        keep=groups.keep,
        rule=LoadRule(load_settings(None, {"ray": settings}).ray),
        wanted=WantedEngines(place, "shop"),
        rows=listed,
        say=lambda _: None,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_engines_come_and_go_as_asked_for(tmp_path: Path) -> None:
    groups = Groups()
    running = asyncio.ensure_future(fleet(groups, tmp_path, []).run(1))
    asking = WantedEngines(tmp_path, "shop")
    await until(lambda: groups.running == {"shop-trainer", "shop-ray-1"})
    asking.ask(3)
    await until(lambda: groups.running == {"shop-trainer", "shop-ray-1", "shop-ray-2", "shop-ray-3"})

    groups.may_end.clear()
    asking.ask(1)
    await until(lambda: groups.draining == {"shop-ray-2", "shop-ray-3"})
    asking.ask(2)
    await until(lambda: "shop-ray-4" in groups.running)
    assert groups.draining == {"shop-ray-2", "shop-ray-3"}, "the end of neither is interrupted"
    groups.may_end.set()
    await until(lambda: groups.running == {"shop-trainer", "shop-ray-1", "shop-ray-4"})

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert groups.running == set()


async def test_an_engine_that_was_removed_is_not_replaced_and_an_idle_one_goes(tmp_path: Path) -> None:
    groups = Groups()
    idle = [{"name": f"shop-ray-{number}", "state": "ready", "calls": 0} for number in (1, 2, 3)]
    running = asyncio.ensure_future(fleet(groups, tmp_path, idle).run(3))
    await until(lambda: len(groups.running) == 4)
    groups.by_itself["shop-ray-2"].set_result(None)
    await until(lambda: groups.running == {"shop-trainer", "shop-ray-1"})
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_failure_of_one_ends_the_others(tmp_path: Path) -> None:
    groups = Groups()
    running = asyncio.ensure_future(fleet(groups, tmp_path, []).run(2))
    await until(lambda: len(groups.running) == 3)
    groups.by_itself["shop-ray-2"].set_exception(PartFailed("no memory"))
    with pytest.raises(PartFailed, match="no memory"):
        await running
    assert groups.running == set()


async def test_it_ends_when_all_have_ended(tmp_path: Path) -> None:
    groups = Groups()
    running = asyncio.ensure_future(fleet(groups, tmp_path, [], trainer=None).run(1))
    await until(lambda: groups.running == {"shop-ray-1"})
    groups.by_itself["shop-ray-1"].set_result(None)
    await running
