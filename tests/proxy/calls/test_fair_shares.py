"""Calls of several runs at one engine that has fewer slots than there are calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from proxy.auth.service import PrincipalKind
from proxy.contract.policy import weight_label
from proxy.engines.place import EnginePlace
from proxy.engines.protocol import GenerateRequest
from proxy.settings import RunSettings
from tests.fakes.engine import FakeEngine, Script
from tests.proxy.calls.world import World

CROWD = 12


def noted(script: Script, name: str, order: list[str]) -> Script:
    """Return a script that also appends a name for every request."""

    def run(request: GenerateRequest) -> Sequence[int]:
        order.append(name)
        return script(request)

    return run


@pytest.mark.parametrize(("share", "among_the_first"), [(1.0, 3), (4.0, 4)])
async def test_a_run_with_many_waiting_calls_leaves_another_run_its_share(
    world: World, share: float, among_the_first: int
) -> None:
    world.swaps.concurrency = 1
    place = world.swaps.place_at(world.engine)
    settings = RunSettings.model_validate({"name": "other", "model": "base/model", "limits": {"share": share}})
    other = await world.store.runs.ensure(settings)
    key = await world.store.credentials.create(PrincipalKind.RUN, run_id=other.id)
    engine = FakeEngine(world.engine.script, label=weight_label(other.id, 0))
    order: list[str] = []
    world.engine.script = noted(world.engine.script, "crowd", order)
    engine.script = noted(engine.script, "other", order)
    # Two engines to the scripts, one engine to the slots.
    world.swaps.engines[other.id] = engine
    world.swaps.places[id(engine)] = EnginePlace(engine, place.load)

    async def post(body: dict[str, object], authorization: str | None = None) -> httpx.Response:
        headers = {} if authorization is None else {"authorization": authorization}
        return await world.post(body, **headers)

    world.engine.gate.clear()
    calls = [asyncio.create_task(post({})) for _ in range(CROWD)]
    async with asyncio.timeout(10):
        while place.calls < CROWD:
            await asyncio.sleep(0.01)
        calls += [asyncio.create_task(post({"model": "other"}, f"Bearer {key.text}")) for _ in range(4)]
        while world.swaps.place_at(engine).calls < 4:
            await asyncio.sleep(0.01)
        world.engine.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
    assert order[0] == "crowd"
    assert order[1:7].count("other") >= among_the_first
    assert order[-1] == "crowd"
