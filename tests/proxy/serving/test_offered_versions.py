"""Engines receive versions from the trainer while it offers them, and read the disk otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.contract.exchange import Join, Offer, Place
from proxy.contract.policy import WeightsReference
from proxy.database.tables import PolicyVersionRow
from proxy.engines.protocol import EngineInfo
from proxy.errors import BaseRlError, EngineFailed, EngineTimeout
from proxy.serving import checks
from proxy.serving.controller import ControllerSetup
from proxy.serving.reconciler import SwapController
from tests.fakes.load import new_load
from tests.proxy.serving.test_reconciler import SwappedEngine
from tests.proxy.turns.world import World
from tests.proxy.versions.offering import Offering, new_tensors
from trainer.publish.listener import Listener

MIXED = "receiving@0"


class ReceivingEngine(SwappedEngine):
    """Receives labels without weights. With a `failure`, it holds a mixture unless it `stages`."""

    def __init__(self, *, stages: bool) -> None:
        super().__init__("http://engine.example:30000")
        self.stages = stages
        self.failure: BaseRlError | None = None
        self.generated_mixed = False

    async def receive_weights(self, place: Place, offer: Offer, label: str) -> None:
        await super().receive_weights(place, offer, label if self.failure is None else self.label)
        if self.failure is not None:
            if not self.stages:
                self.label = MIXED
            raise self.failure

    async def resume(self) -> None:
        self.generated_mixed = self.generated_mixed or self.label == MIXED
        await super().resume()

    async def info(self) -> EngineInfo:
        found: EngineInfo = await super().info()  # type: ignore[no-untyped-call]
        return EngineInfo(
            model_path=found.model_path, weight_label=found.weight_label, loads_between_steps=self.stages, ranks=2
        )

    def received(self) -> int:
        return sum(name == "receive_weights" for name, _ in self.calls)


class Bench(Offering):
    """A trainer that listens, and an engine that sees its disk."""

    def __init__(self, world: World, directory: Path, *, stages: bool) -> None:
        super().__init__(world, directory)
        self.asked: list[int] = []
        self.listener = Listener("127.0.0.1", 0)
        self.listener.offer("secret", self.open)
        self.engine = ReceivingEngine(stages=stages)
        self.swaps = SwapController(
            ControllerSetup(
                database=world.database,
                engine=self.engine,
                signals=world.signals,
                clock=world.clock,
                load=new_load(),
                run_id=world.run.id,
                inspector=self.inspector,
                health_interval_seconds=0.01,
            )
        )

    def open(self, ranks: int) -> Place:
        self.asked.append(ranks)
        return Place(host="127.0.0.1", port=9, group="weights-1")

    async def offered(self) -> WeightsReference:
        self.tensors = new_tensors()
        return await self.commit(self.tensors, self.listener.url)

    async def saved(self, weights: WeightsReference) -> WeightsReference:
        durable = self.write(weights, self.tensors)
        version = (await self.versions.head(self.world.run)).version
        await self.unsaved.save(self.world.run, version, durable)
        return durable

    async def until_at(self, version: int) -> None:
        """Reconcile until the engine serves the version: a failed load is followed by a pause."""
        while self.swaps.version != version:
            await self.swaps.reconcile()
            await asyncio.sleep(0.005)

    async def states(self) -> list[str]:
        rows = sorted(await self.world.rows(PolicyVersionRow), key=lambda row: int(row.version))
        return [row.state for row in rows]


@pytest.fixture(params=[True, False], ids=["stages", "mixes"])
def bench(
    world: World, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    monkeypatch.setattr(checks, "PATIENCE_SECONDS", 60.0)  # one round loads, however busy the machine is
    made = Bench(world, tmp_path, stages=request.param)
    yield made
    made.listener.close()


async def test_an_engine_receives_a_version_before_it_is_on_the_disk(bench: Bench) -> None:
    weights = await bench.offered()
    await bench.swaps.reconcile()
    assert (bench.swaps.version, bench.engine.label) == (1, f"{bench.world.run_id}@1")
    assert bench.asked == [2]
    assert ("pause" in [name for name, _ in bench.engine.calls]) is not bench.engine.stages
    await bench.saved(weights)
    await bench.swaps.reconcile()
    assert (bench.engine.received(), bench.engine.loads()) == (1, [])
    assert await bench.states() == ["retired", "serving"]


async def test_an_engine_that_comes_later_reads_the_disk(bench: Bench) -> None:
    weights = await bench.saved(await bench.offered())
    bench.listener.withdraw()
    await bench.swaps.reconcile()
    assert (bench.swaps.version, bench.engine.model_path) == (1, weights.uri)
    assert bench.engine.received() == 0


@pytest.mark.parametrize("gone", ["withdrawn", "dead"])
async def test_while_nobody_sends_the_version_before_is_served(bench: Bench, gone: str) -> None:
    first = await bench.saved(await bench.offered())
    await bench.until_at(1)
    weights = await bench.offered()
    if gone == "dead":
        bench.listener.close()
    else:
        bench.listener.withdraw()
    await bench.swaps.reconcile()
    await bench.swaps.reconcile()
    assert (bench.swaps.version, bench.engine.label) == (1, f"{bench.world.run_id}@1")
    assert len(await bench.world.events("version.load_failed")) == (1 if gone == "dead" else 0)
    second = await bench.saved(weights)
    await bench.until_at(2)
    assert bench.engine.model_path == second.uri
    assert first.uri != second.uri
    assert await bench.states() == ["retired", "retired", "serving"]
    if gone == "withdrawn":
        bench.listener.offer("secret", bench.open)


@pytest.mark.parametrize("failure", [EngineFailed("the sender is gone"), EngineTimeout("silence")])
async def test_a_transfer_that_breaks_leaves_the_version_before(bench: Bench, failure: BaseRlError) -> None:
    first = await bench.saved(await bench.offered())
    await bench.until_at(1)
    weights = await bench.offered()
    bench.engine.failure = failure
    await bench.swaps.reconcile()
    assert (bench.swaps.version, bench.engine.label) == (1, f"{bench.world.run_id}@1")
    assert not bench.engine.generated_mixed
    assert len(bench.engine.loads()) == (1 if bench.engine.stages else 2)  # the second in place of the mixture
    assert bench.engine.model_path == first.uri
    await bench.swaps.reconcile()
    assert bench.engine.received() == 1  # no second attempt: the disk has it soon
    second = await bench.saved(weights)
    await bench.until_at(2)
    assert bench.engine.model_path == second.uri
    assert await bench.states() == ["retired", "retired", "serving"]


async def test_a_mixture_that_a_dead_proxy_left_is_no_version(bench: Bench) -> None:
    await bench.saved(await bench.offered())
    await bench.until_at(1)
    bench.engine.label = MIXED
    bench.listener.withdraw()
    await bench.offered()
    await bench.swaps.reconcile()
    assert bench.swaps.version is None or bench.engine.label == f"{bench.world.run_id}@1"
    await bench.until_at(1)
    assert bench.engine.label == f"{bench.world.run_id}@1"


async def test_a_damaged_version_before_is_handled_as_ever(bench: Bench) -> None:
    first = await bench.saved(await bench.offered())
    await bench.until_at(1)
    file = Path(first.uri) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    await bench.offered()
    await bench.swaps.reconcile()
    assert bench.engine.received() == 0  # not without a sound version to return to
    await bench.swaps.reconcile()
    assert (await bench.states())[2] != "rejected"


async def test_an_answer_that_names_another_host_is_refused(bench: Bench) -> None:
    def elsewhere(_: int) -> Any:
        return Place(host="192.0.2.7", port=9, group="weights-1")

    bench.listener.offer("secret", elsewhere)
    await bench.offered()
    await bench.swaps.reconcile()
    assert bench.engine.received() == 0
    (event,) = await bench.world.events("version.load_failed")
    assert "192.0.2.7" in event["error"]


def test_a_request_to_join_needs_a_token() -> None:
    assert Join(token="t").ranks == 1
