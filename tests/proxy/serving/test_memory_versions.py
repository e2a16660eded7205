"""Engines read versions in shared memory if they see it, and the disk otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from proxy.contract.memory import reading, remove_unread
from proxy.contract.policy import UNCOMMITTED_MARK, WeightsReference
from proxy.database.tables import PolicyVersionRow
from proxy.errors import EngineFailed
from proxy.serving import checks
from proxy.serving.checks import shares_memory
from proxy.serving.controller import ControllerSetup
from proxy.serving.reconciler import SwapController
from proxy.versions.inspector import WeightsInspector
from tests.fakes.load import new_load
from tests.proxy.serving.test_reconciler import SwappedEngine
from tests.proxy.turns.world import World
from tests.proxy.versions.test_saving import Memory
from trainer.publish.directories import is_locked

NEAR, FAR = "http://127.0.0.1:9", "http://engine.example:30000"


class Bench(Memory):
    """A trainer in memory, and an engine at an address with its controller."""

    def __init__(self, world: World, directory: Path) -> None:
        super().__init__(world, directory)
        self.engine, self.swaps = self.served_at(NEAR)

    def served_at(self, address: str) -> tuple[SwappedEngine, SwapController]:
        engine = SwappedEngine(address)
        setup = ControllerSetup(
            database=self.world.database,
            engine=engine,
            signals=self.world.signals,
            clock=self.world.clock,
            load=new_load(),
            run_id=self.world.run.id,
            inspector=WeightsInspector(self.disk, memory=self.memory),
            health_interval_seconds=0.01,
        )
        return engine, SwapController(setup)

    def place(self, weights: WeightsReference) -> Path:
        return self.memory / "run_x" / Path(weights.uri).name

    async def published(self) -> WeightsReference:
        """Commit a version and save it, and return its reference."""
        request = await self.commit()
        version = (await self.versions.head(self.world.run)).version
        durable = self.copy(request.weights)
        await self.unsaved.save(self.world.run, version, durable)
        return durable

    async def states(self) -> list[str]:
        rows = sorted(await self.world.rows(PolicyVersionRow), key=lambda row: int(row.version))
        return [row.state for row in rows]


@pytest.fixture
def bench(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(checks, "PATIENCE_SECONDS", 60.0)  # one round loads, however busy the machine is
    return Bench(world, tmp_path)


async def test_an_engine_of_this_machine_loads_a_version_before_it_is_on_the_disk(bench: Bench) -> None:
    request = await bench.commit()
    await bench.swaps.reconcile()
    assert bench.swaps.version == 1
    assert bench.engine.model_path == str(bench.place(request.weights))
    await bench.unsaved.save(bench.world.run, 1, bench.copy(request.weights))
    await bench.swaps.reconcile()
    assert len(bench.engine.loads()) == 1
    assert await bench.states() == ["retired", "serving"]


async def test_an_engine_elsewhere_serves_the_version_before_until_the_next_is_on_the_disk(bench: Bench) -> None:
    engine, swaps = bench.served_at(FAR)
    first = await bench.published()
    await swaps.reconcile()
    assert (swaps.version, engine.model_path) == (1, first.uri)
    request = await bench.commit()
    await swaps.reconcile()
    assert (swaps.version, engine.model_path) == (1, first.uri)
    await bench.unsaved.save(bench.world.run, 2, bench.copy(request.weights))
    await swaps.reconcile()
    assert (swaps.version, engine.model_path) == (2, request.weights.uri)
    assert await bench.world.events("version.load_failed") == []


async def test_a_version_that_another_proxy_gave_to_the_engine_stays(bench: Bench) -> None:
    engine, swaps = bench.served_at(FAR)
    await bench.commit()
    engine.label = f"{bench.world.run_id}@1"
    await swaps.reconcile()
    assert swaps.version == 1
    assert engine.loads() == []


async def test_after_a_restart_of_the_machine_the_version_before_is_served(bench: Bench) -> None:
    first = await bench.published()
    await bench.commit()
    shutil.rmtree(bench.memory)
    engine, swaps = bench.served_at(NEAR)
    await swaps.reconcile()
    assert (swaps.version, engine.model_path) == (1, first.uri)
    await bench.unsaved.take_back(bench.world.run)
    await swaps.reconcile()
    assert swaps.version == 1
    assert await bench.states() == ["retired", "serving", "rolled_back"]


async def test_a_version_that_is_taken_back_leaves_the_engine(bench: Bench) -> None:
    first = await bench.published()
    await bench.commit()
    await bench.swaps.reconcile()
    assert bench.swaps.version == 2
    await bench.unsaved.take_back(bench.world.run)
    await bench.swaps.reconcile()
    assert bench.swaps.version == 1
    assert bench.engine.model_path == str(bench.place(first))


async def test_a_copy_that_is_damaged_later_is_read_from_the_disk(bench: Bench) -> None:
    weights = await bench.published()
    file = bench.place(weights) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    await bench.swaps.reconcile()
    await bench.swaps.reconcile()
    assert (bench.swaps.version, bench.engine.model_path) == (1, weights.uri)
    assert await bench.states() == ["retired", "serving"]


async def test_an_engine_that_refuses_the_memory_gets_the_disk(bench: Bench) -> None:
    await bench.swaps.reconcile()
    request = await bench.commit()
    bench.engine.load_error = EngineFailed("no such directory: it runs in a container")
    await bench.swaps.reconcile()
    assert bench.swaps.version == 0
    bench.engine.load_error = None
    await bench.swaps.reconcile()
    assert bench.swaps.version == 0
    await bench.unsaved.save(bench.world.run, 1, bench.copy(request.weights))
    while bench.swaps.version != 1:  # after the pause that follows a failed load
        await bench.world.signals.versions.wait(0.01)
        await bench.swaps.reconcile()
    assert bench.engine.model_path == request.weights.uri
    assert await bench.states() == ["retired", "serving"]


async def test_a_copy_is_locked_while_the_engine_reads_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = await bench.published()
    mark = bench.place(weights) / ".uncommitted"
    locked: list[bool] = []

    async def load(path: str, label: str) -> None:
        locked.append(is_locked(mark))
        bench.engine.label, bench.engine.model_path = label, path

    monkeypatch.setattr(bench.engine, "load_weights", load)
    await bench.swaps.reconcile()
    assert locked == [True]
    assert not is_locked(mark)
    with reading(mark.parent) as is_there:
        assert is_there
    remove_unread(mark.parent, shutil.rmtree)
    with reading(mark.parent) as is_there:
        assert not is_there


async def test_a_copy_that_is_removed_before_the_load_is_read_from_the_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = await bench.published()
    place = bench.place(weights)
    inner = bench.engine.info

    async def info() -> Any:
        (place / UNCOMMITTED_MARK).unlink(missing_ok=True)
        return await inner()  # type: ignore[no-untyped-call]

    monkeypatch.setattr(bench.engine, "info", info)
    await bench.swaps.reconcile()
    assert bench.engine.loads() == []
    shutil.rmtree(place)
    while bench.swaps.version != 1:  # after the pause that follows a failed load
        await bench.world.signals.versions.wait(0.01)
        await bench.swaps.reconcile()
    assert bench.engine.model_path == weights.uri
    assert await bench.states() == ["retired", "serving"]


@pytest.mark.parametrize(
    ("address", "is_near"),
    [
        ("http://127.0.0.1:30000", True),
        ("http://localhost:30000", True),
        ("http://[::1]:30000", True),
        ("http://engine:30000", False),
        ("http://10.0.0.7:30000", False),
        ("fake://engine", False),
    ],
)
def test_only_engines_at_loopback_addresses_may_see_this_memory(address: str, is_near: bool) -> None:
    assert shares_memory(address) is is_near
