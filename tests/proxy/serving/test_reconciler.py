from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.contract.policy import Probe, WeightsFormat, WeightsReference, weight_label
from proxy.database.tables import PolicyVersionRow
from proxy.engines.protocol import PauseMode
from proxy.errors import BaseRlError, EngineFailed, EngineTimeout, EngineUnavailable
from proxy.serving import checks, faults
from proxy.serving.controller import ControllerSetup
from proxy.serving.reconciler import SwapController
from proxy.versions.inspector import WeightsInspector
from proxy.versions.service import VersionService
from proxy.versions.steering import Decision
from proxy.versions.tensor_digests import TensorDigests
from tests.fakes.engine import FakeEngine
from tests.fakes.load import new_load
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, publish, publish_difference, steering_of, versions_of
from tests.proxy.versions.publishing import inspector as new_inspector


class SwappedEngine(FakeEngine):
    """Delays, or fails, the requests of a swap. `stopped` is true between a pause and the resume."""

    def __init__(self, address: str = "fake://engine") -> None:
        super().__init__(lambda _request: (), model_path="base/model", address=address)
        self.load_error: BaseRlError | None = None
        self.info_error: BaseRlError | None = None
        self.failing_resumes = 0
        self.dies_at_pause = False
        self.stopped = False
        self.loading = asyncio.Event()
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def pause(self, mode: PauseMode) -> None:
        if self.dies_at_pause:
            self.down = True
        await super().pause(mode)
        self.stopped = True

    async def resume(self) -> None:
        if self.failing_resumes:
            self.failing_resumes -= 1
            raise EngineFailed("cannot resume")
        await super().resume()
        self.stopped = False

    async def load_weights(self, path: str, label: str) -> None:
        self.loading.set()
        await self.may_load.wait()
        if self.load_error is not None:
            raise self.load_error
        await super().load_weights(path, label)

    async def info(self):  # type: ignore[no-untyped-def]
        if self.info_error is not None:
            raise self.info_error
        return await super().info()

    def restart(self) -> None:
        self.label, self.model_path, self.stopped = "default", "base/model", False

    def is_stopped(self) -> bool:
        return self.stopped

    def loads(self) -> list[str]:
        return [call[1][1] for call in self.calls if call[0] == "load_weights"]  # type: ignore[index]


class Heard:
    """An observer that records its events."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.failures = 0

    def swap_finished(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def swap_failed(self) -> None:
        self.failures += 1

    def weights_wrong(self) -> None:
        self.failures += 1


class Bench:
    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        self.engine = SwappedEngine()
        self.heard = Heard()
        self.versions = versions_of(world)
        self.claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
        self.swaps = self.controller()

    def controller(
        self, health_interval_seconds: float = 0.01, inspector: WeightsInspector | None = None
    ) -> SwapController:
        setup = ControllerSetup(
            database=self.world.database,
            engine=self.engine,
            signals=self.world.signals,
            clock=self.world.clock,
            load=new_load(),
            run_id=self.world.run.id,
            inspector=inspector or new_inspector(),
            health_interval_seconds=health_interval_seconds,
            observer=self.heard,
        )
        return SwapController(setup)

    async def commit(
        self,
        form: WeightsFormat = WeightsFormat.HUGGINGFACE,
        weights: WeightsReference | None = None,
        *,
        logprob: float | None = None,
    ) -> WeightsReference:
        """Commit a version, with a probe that has this log-probability for every token."""
        await self.world.ready()
        batch = await self.claims.claim(self.world.run, ClaimRequest(trainer="t", want=1, max_staleness=100))
        assert batch.claim_id is not None
        weights = weights or publish(self.directory, form=form)
        head = await self.versions.head(self.world.run)
        request = commit_request([batch.claim_id], head.version, weights)
        if logprob is not None:
            request = msgspec.structs.replace(request, probe=Probe(ids=(3, 1, 4), logprobs=(logprob,) * 2))
        await self.versions.commit(self.world.run, request)
        return weights

    def label(self, version: int) -> str:
        return weight_label(self.world.run_id, version)

    def serving(self) -> int | None:
        return self.swaps.version

    async def states(self) -> list[str]:
        return [row.state for row in await self.rows()]

    async def rows(self) -> list[Any]:
        """Return the versions in their order, which PostgreSQL does not keep by itself."""
        return sorted(await self.world.rows(PolicyVersionRow), key=lambda row: int(row.version))

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not reached():
                await self.world.signals.versions.wait(0.01)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.swaps.run_forever())
        try:
            yield
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


@pytest.fixture
def bench(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(checks, "PATIENCE_SECONDS", 60.0)  # one round loads, however busy the machine is
    return Bench(world, tmp_path / "storage")


async def test_nothing_is_served_before_the_engine_was_asked(bench: Bench) -> None:
    assert bench.serving() is None


async def test_a_fresh_engine_is_labelled_and_not_reloaded(bench: Bench) -> None:
    await bench.swaps.reconcile()
    assert bench.engine.label == bench.label(0)
    assert bench.engine.loads() == []
    assert bench.serving() == 0
    assert bench.heard.seconds == []


async def test_an_engine_with_another_model_gets_the_base_model(bench: Bench) -> None:
    bench.engine.model_path = "other/model"
    await bench.swaps.reconcile()
    assert ("load_weights", ("base/model", bench.label(0))) in bench.engine.calls
    assert bench.serving() == 0


async def test_a_rolled_back_version_serves_until_the_one_before_is_loaded(bench: Bench) -> None:
    weights = await bench.commit()
    await bench.commit()
    await bench.swaps.reconcile()
    assert bench.serving() == 2
    steering, decision = steering_of(bench.world), Decision(reason="worse", by="key_1")
    standing = await steering.roll_back(bench.world.run, None, decision, leave_out_sessions=False)
    assert (standing.head, standing.rolled_back) == (1, (2,))
    bench.engine.loading.clear()
    bench.engine.may_load.clear()
    async with bench.running():
        await bench.engine.loading.wait()
        assert bench.serving() == 2, "calls go on"
        bench.engine.may_load.set()
        await bench.until(lambda: bench.serving() == 1)
    assert bench.engine.loads()[-1] == bench.label(1)
    assert bench.engine.model_path == weights.uri
    await bench.swaps.reconcile()
    assert await bench.states() == ["retired", "serving", "rolled_back"]
    assert (await bench.world.current_run()).serving_version == 1


async def test_a_pinned_version_stays_in_the_engine(bench: Bench) -> None:
    await bench.commit()
    await bench.swaps.reconcile()
    steering, decision = steering_of(bench.world), Decision(reason="shown to customers", by="key_1")
    await steering.pin(bench.world.run, 1, decision)
    await bench.commit()
    await bench.swaps.reconcile()
    assert bench.serving() == 1
    await steering.unpin(bench.world.run, decision)
    await bench.swaps.reconcile()
    assert bench.serving() == 2
    assert await bench.states() == ["retired", "retired", "serving"]


async def test_a_rejected_version_in_the_engine_answers_no_call(bench: Bench) -> None:
    await bench.commit()
    await bench.swaps.reconcile()
    await steering_of(bench.world).reject(bench.world.run, 1, Decision(reason="it leaks", by="key_1"))
    bench.engine.load_error = EngineFailed("not now")
    await bench.swaps.reconcile()
    assert bench.serving() is None
    bench.engine.load_error = None
    async with bench.running():
        await bench.until(lambda: bench.serving() == 0)


async def test_a_commit_is_swapped_in(bench: Bench) -> None:
    await bench.swaps.reconcile()
    weights = await bench.commit()
    bench.world.clock.now += 3
    bench.engine.calls.clear()
    await bench.swaps.reconcile()
    assert bench.engine.calls == [
        ("pause", PauseMode.IN_PLACE),
        ("load_weights", (weights.uri, bench.label(1))),
        ("resume", None),
    ]
    assert bench.serving() == 1
    assert (await bench.world.current_run()).serving_version == 1
    assert await bench.states() == ["retired", "serving"]
    row = (await bench.world.rows(PolicyVersionRow))[1]
    assert row.served_at == bench.world.clock.now
    assert bench.heard.seconds == [row.swap_seconds]
    (event,) = await bench.world.events("version.served")
    assert event == {"version": 1, "previous": 0, "swap_seconds": row.swap_seconds}
    bench.engine.calls.clear()
    await bench.swaps.reconcile()
    assert bench.engine.calls == []


async def test_an_engine_that_loads_between_steps_is_not_paused(bench: Bench) -> None:
    bench.engine.loads_between_steps = True
    await bench.swaps.reconcile()
    weights = await bench.commit()
    bench.engine.calls.clear()
    await bench.swaps.reconcile()
    assert bench.engine.calls == [("load_weights", (weights.uri, bench.label(1)))]
    assert (bench.serving(), bench.heard.seconds) == (1, [0.0])


async def test_a_difference_is_made_whole_before_the_engine_reads_it(bench: Bench, tmp_path: Path) -> None:
    inspector = WeightsInspector(bench.directory, tmp_path / "cache", 10**9)
    world = bench.world
    bench.versions = VersionService(
        database=world.database, clock=world.clock, signals=world.signals, inspector=inspector
    )
    bench.swaps = bench.controller(inspector=inspector)
    await bench.swaps.reconcile()
    weights, content = publish_difference(bench.directory, publish(bench.directory))
    await bench.commit(weights=weights)
    await bench.swaps.reconcile()
    assert bench.serving() == 1
    (path,) = {call[1][0] for call in bench.engine.calls if call[0] == "load_weights"}  # type: ignore[index]
    assert path == inspector.path_of(weights) != weights.uri
    assert (Path(path) / "model.safetensors").read_bytes() == content
    # The store keeps where the difference is, and its size as engines see it.
    (view,) = [each for each in await bench.versions.list_(world.run) if each.version == 1]
    assert view.weights is not None
    assert (view.weights.uri, view.weights.bytes) == (weights.uri, len(content))


async def test_an_adapter_is_loaded_by_an_engine_that_takes_adapters(bench: Bench) -> None:
    await bench.swaps.reconcile()
    weights = await bench.commit(WeightsFormat.ADAPTER)
    await bench.swaps.reconcile()
    assert ("load_weights", (weights.uri, bench.label(1))) in bench.engine.calls
    assert bench.serving() == 1


async def test_the_formats_that_the_engine_loads_are_those_it_reports(bench: Bench) -> None:
    formats = [bench.swaps.formats]
    for bench.engine.adapters in (True, False):
        await bench.swaps.reconcile()
        formats.append(bench.swaps.formats)
    bench.engine.down = True
    await bench.swaps.reconcile()
    formats.append(bench.swaps.formats)
    whole = (WeightsFormat.HUGGINGFACE,)
    assert formats == [None, (*whole, WeightsFormat.ADAPTER), whole, None]


async def test_an_engine_of_whole_weights_is_never_given_an_adapter(bench: Bench) -> None:
    """It would ignore names that it does not know, and serve the base under the version's label."""
    bench.engine.adapters = False
    await bench.swaps.reconcile()
    await bench.commit(WeightsFormat.ADAPTER)
    await bench.swaps.reconcile()
    assert (bench.engine.loads(), bench.serving()) == ([], 0)
    (event,) = await bench.world.events("version.load_failed")
    assert "trainer.adapter.publish = merged" in event["error"]
    await bench.commit()
    await bench.swaps.reconcile()
    assert (bench.engine.loads(), bench.serving()) == ([bench.label(2)], 2)


async def test_the_old_version_serves_while_the_new_one_loads(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.may_load.clear()
    swap = asyncio.create_task(bench.swaps.reconcile())
    await bench.engine.loading.wait()
    assert bench.serving() == 0
    bench.engine.may_load.set()
    await swap
    assert bench.serving() == 1


async def test_only_the_newest_version_is_loaded(bench: Bench) -> None:
    await bench.swaps.reconcile()
    for _ in range(3):
        await bench.commit()
    await bench.swaps.reconcile()
    assert bench.engine.loads() == [bench.label(3)]
    assert await bench.states() == ["retired", "retired", "retired", "serving"]
    assert [row.served_at is None for row in await bench.world.rows(PolicyVersionRow)] == [False, True, True, False]


async def test_a_restarted_engine_is_reloaded_before_it_serves(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    await bench.swaps.reconcile()
    bench.engine.restart()
    bench.engine.may_load.clear()
    bench.engine.loading.clear()
    reload = asyncio.create_task(bench.swaps.reconcile())
    await bench.engine.loading.wait()
    assert bench.serving() is None
    bench.engine.may_load.set()
    await reload
    assert bench.engine.loads() == [bench.label(1), bench.label(1)]
    assert bench.serving() == 1
    assert len(await bench.world.events("version.served")) == 1


async def test_a_lost_engine_is_not_ready_until_it_holds_our_version(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    await bench.swaps.reconcile()
    bench.engine.down = True
    await bench.swaps.reconcile()
    assert bench.serving() is None
    bench.engine.down = False
    bench.engine.restart()
    bench.engine.load_error = EngineFailed("bad weights")
    await bench.swaps.reconcile()
    assert bench.serving() is None
    bench.engine.load_error = None
    async with bench.running():
        await bench.until(lambda: bench.serving() == 1)
        async with asyncio.timeout(60):
            while len(await bench.world.events("engine.ready")) < 2:
                await bench.world.signals.events.wait(0.01)
    assert len(await bench.world.events("engine.lost")) == 1


async def test_a_slow_engine_is_given_three_chances(bench: Bench) -> None:
    await bench.swaps.reconcile()
    bench.engine.info_error = EngineTimeout("slow")
    for ready in (True, True, False):
        await bench.swaps.reconcile()
        assert (bench.serving() is not None) is ready
    bench.engine.info_error = None
    await bench.swaps.reconcile()
    assert bench.serving() is not None


async def test_a_failed_load_keeps_the_old_version(bench: Bench) -> None:
    bench.swaps = bench.controller(health_interval_seconds=3600.0)
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.load_error = EngineFailed("shapes differ")
    await bench.swaps.reconcile()
    assert not bench.engine.is_stopped()
    assert bench.serving() == 0
    assert (await bench.world.current_run()).serving_version == 0
    assert await bench.states() == ["serving", "committed"]
    assert bench.heard.failures == 1
    (event,) = await bench.world.events("version.load_failed")
    assert (event["version"], event["attempt"]) == (1, 1)
    assert "shapes differ" in event["error"]
    bench.engine.calls.clear()
    await bench.swaps.reconcile()
    assert bench.engine.calls == []  # it waits before the next attempt


async def test_a_failed_load_is_tried_again(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.load_error = EngineFailed("shapes differ")
    await bench.swaps.reconcile()
    assert bench.serving() == 0
    bench.engine.load_error = None
    async with bench.running():
        await bench.until(lambda: bench.serving() == 1)


async def test_a_newer_version_is_tried_at_once_after_a_failed_one(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.load_error = EngineFailed("shapes differ")
    await bench.swaps.reconcile()
    bench.engine.load_error = None
    await bench.commit()
    await bench.swaps.reconcile()
    assert bench.serving() == 2


async def test_an_engine_that_dies_in_a_swap(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.load_error = EngineUnavailable("connection lost")
    bench.engine.may_load.clear()
    swap = asyncio.create_task(bench.swaps.reconcile())
    await bench.engine.loading.wait()
    bench.engine.down = True
    bench.engine.may_load.set()
    await swap
    assert bench.serving() is None
    bench.engine.down, bench.engine.load_error = False, None
    bench.engine.restart()
    async with bench.running():
        await bench.until(lambda: bench.serving() == 1)
    assert not bench.engine.is_stopped()


async def test_a_resume_that_fails_is_tried_again(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.failing_resumes = 3
    await bench.swaps.reconcile()
    assert not bench.engine.is_stopped()
    assert bench.serving() == 1


async def test_an_engine_that_cannot_be_resumed_is_not_ready(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.failing_resumes = 7
    await bench.swaps.reconcile()
    assert bench.engine.is_stopped()
    assert bench.serving() is None
    await bench.swaps.reconcile()
    assert not bench.engine.is_stopped()
    assert bench.serving() == 1
    assert await bench.states() == ["retired", "serving"]


async def test_cancelling_in_a_swap_resumes(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.may_load.clear()
    bench.engine.failing_resumes = 1
    async with bench.running():
        await bench.engine.loading.wait()
        assert bench.engine.is_stopped()
    assert not bench.engine.is_stopped()


async def test_a_proxy_that_died_in_a_swap_left_the_engine_paused(bench: Bench) -> None:
    bench.engine.stopped = True
    await bench.swaps.reconcile()
    assert not bench.engine.is_stopped()
    assert bench.serving() == 0


async def test_a_swap_that_was_not_written_down_is_written_down_later(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.label = bench.label(1)
    bench.swaps = bench.controller()
    await bench.swaps.reconcile()
    assert bench.engine.loads() == []
    assert (await bench.world.current_run()).serving_version == 1
    assert await bench.states() == ["retired", "serving"]


async def test_weights_of_another_run_or_of_a_lost_future_are_replaced(bench: Bench) -> None:
    for label in ("run_other@0", bench.label(9)):
        bench.engine.label = label
        await bench.swaps.reconcile()
        assert bench.engine.label == bench.label(0)
        assert bench.serving() == 0


async def test_the_loop_swaps_as_soon_as_a_version_is_committed(bench: Bench) -> None:
    bench.swaps = bench.controller(health_interval_seconds=3600.0)
    async with bench.running():
        await bench.until(lambda: bench.serving() == 0)
        for version in (1, 2):
            await bench.commit()
            await bench.until(lambda wanted=version: bench.serving() == wanted)  # type: ignore[misc]


async def test_one_lost_connection_does_not_interrupt_other_calls(bench: Bench) -> None:
    await bench.swaps.reconcile()
    bench.swaps.recheck_engine()
    assert bench.serving() == 0
    await bench.swaps.reconcile()
    assert bench.serving() == 0
    assert not await bench.world.events("engine.lost")


async def test_after_a_lost_connection_the_engine_is_asked_at_once(bench: Bench) -> None:
    bench.swaps = bench.controller(health_interval_seconds=3600.0)
    async with bench.running():
        await bench.until(lambda: bench.serving() == 0)
        bench.engine.down = True
        bench.swaps.recheck_engine()
        await bench.until(lambda: bench.serving() is None)


async def test_an_engine_that_loses_a_connection_and_then_does_not_answer_is_lost(bench: Bench) -> None:
    await bench.swaps.reconcile()
    bench.engine.info_error = EngineTimeout("slow")
    bench.swaps.recheck_engine()
    await bench.swaps.reconcile()
    assert bench.serving() is None


async def test_an_engine_that_restarted_after_a_lost_connection_serves_no_version_until_it_is_reloaded(
    bench: Bench,
) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    await bench.swaps.reconcile()
    bench.engine.restart()
    bench.engine.loading.clear()
    bench.engine.may_load.clear()
    bench.swaps.recheck_engine()
    reload = asyncio.create_task(bench.swaps.reconcile())
    await bench.engine.loading.wait()
    assert bench.serving() is None
    bench.engine.may_load.set()
    await reload
    assert bench.serving() == 1


async def test_a_version_that_the_engine_was_never_given_is_not_blamed_for_its_death(bench: Bench) -> None:
    """The engine dies of version 1 while it is paused for version 2."""
    await bench.swaps.reconcile()
    await bench.commit()
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.dies_at_pause = True
    await bench.swaps.reconcile()
    assert [row.engine_deaths for row in await bench.rows()] == [0, 1, 0]


async def test_the_loop_survives_whatever_happens(bench: Bench) -> None:
    bench.engine.info_error = RuntimeError("a bug")  # type: ignore[assignment]
    async with bench.running():
        await asyncio.sleep(0)
        await bench.world.signals.versions.wait(0.03)
        bench.engine.info_error = None
        await bench.until(lambda: bench.serving() == 0)


async def damage(weights: WeightsReference) -> None:
    """Flip bits of the last number; name and size stay the same."""
    file = Path(weights.uri) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


async def settled(bench: Bench, rounds: int = 3) -> None:
    for _ in range(rounds):
        await bench.swaps.reconcile()


async def test_files_that_changed_since_their_commit_never_reach_an_engine(bench: Bench) -> None:
    await bench.swaps.reconcile()
    good = await bench.commit()
    await bench.swaps.reconcile()
    bad = await bench.commit()
    await damage(bad)
    await settled(bench)
    assert bench.engine.loads() == [bench.label(1)]
    assert bench.serving() == 1
    assert await bench.states() == ["retired", "serving", "rejected"]
    assert bench.heard.failures == 1
    (event,) = await bench.world.events("version.rejected")
    assert (event["version"], event["head"]) == (2, 1)
    assert "SHA-256 differs" in event["reason"]
    head = await bench.versions.head(bench.world.run)
    assert (head.version, head.weights) == (1, good)
    await bench.commit()
    await bench.swaps.reconcile()
    assert bench.engine.loads() == [bench.label(1), bench.label(3)]
    assert await bench.states() == ["retired", "retired", "rejected", "serving"]


async def test_a_restarted_engine_gets_the_newest_good_version(bench: Bench) -> None:
    await bench.swaps.reconcile()
    made = [await bench.commit() for _ in range(3)]
    await bench.swaps.reconcile()
    assert bench.serving() == 3
    for weights in made[1:]:
        await damage(weights)
    bench.engine.restart()
    await settled(bench, 4)
    assert bench.engine.loads() == [bench.label(3), bench.label(1)]
    assert bench.serving() == 1
    assert await bench.states() == ["retired", "serving", "rejected", "rejected"]


async def test_without_any_good_version_the_base_model_serves(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await damage(await bench.commit())
    await settled(bench)
    assert bench.serving() == 0
    assert (await bench.versions.head(bench.world.run)).weights is None


async def kill(bench: Bench, *, during_load: bool) -> None:
    """Simulate one life of an engine that dies of the version it loads."""
    bench.engine.restart()
    bench.engine.down = False
    bench.engine.load_error = EngineUnavailable("connection lost") if during_load else None
    await bench.swaps.reconcile()
    bench.engine.down, bench.engine.load_error = True, None
    await bench.swaps.reconcile()


@pytest.mark.parametrize("during_load", [True, False])
async def test_a_version_that_killed_engines_is_not_loaded_again(bench: Bench, during_load: bool) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    await bench.swaps.reconcile()
    bench.swaps = bench.controller()
    await bench.commit()
    await kill(bench, during_load=during_load)
    assert await bench.states() == [
        "retired",
        "serving" if during_load else "retired",
        "committed" if during_load else "serving",
    ]
    bench.swaps = bench.controller()  # a restarted proxy continues the count
    await kill(bench, during_load=during_load)
    assert (await bench.states())[2] == "rejected"
    (event,) = await bench.world.events("version.rejected")
    assert "the engine stopped 2 times" in event["reason"]
    tries = bench.engine.loads().count(bench.label(2))
    bench.engine.restart()
    bench.engine.down = False
    await settled(bench)
    assert bench.serving() == 1
    assert bench.engine.loads().count(bench.label(2)) == tries


async def test_an_engine_that_dies_of_every_version_takes_only_one_along(bench: Bench) -> None:
    """The cause is another one, so good versions are kept, and the next death is logged as such."""
    await bench.swaps.reconcile()
    for _ in range(2):
        await bench.commit()
        await bench.swaps.reconcile()
    for version in (2, 1):
        for _ in range(3):
            await kill(bench, during_load=True)
            bench.swaps = bench.controller()
        assert (await bench.rows())[version].engine_deaths >= 2
    assert [state == "rejected" for state in await bench.states()] == [False, False, True]
    assert len(await bench.world.events("version.rejected")) == 1


async def test_an_engine_that_lived_on_takes_suspicion_away(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    await kill(bench, during_load=False)
    assert (await bench.rows())[1].engine_deaths == 1
    bench.engine.restart()
    bench.engine.down = False
    await bench.swaps.reconcile()
    monkeypatch.setattr(faults, "SUSPECT_SECONDS", 0.0)
    await bench.swaps.reconcile()
    assert (await bench.rows())[1].engine_deaths == 0
    bench.engine.down = True
    await bench.swaps.reconcile()
    assert (await bench.rows())[1].engine_deaths == 0


async def test_two_proxies_that_see_one_death_count_one(bench: Bench) -> None:
    await bench.swaps.reconcile()
    other = bench.controller()
    await bench.commit()
    await bench.swaps.reconcile()
    bench.engine.label = bench.label(0)
    await other.reconcile()
    bench.engine.down = True
    await bench.swaps.reconcile()
    await other.reconcile()
    assert (await bench.rows())[1].engine_deaths == 1


async def test_a_version_that_engines_refuse_again_and_again_is_given_up(bench: Bench) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    bench.engine.load_error = EngineFailed("shapes differ")
    async with bench.running():
        async with asyncio.timeout(60):
            while not await bench.world.events("version.rejected"):
                await bench.world.signals.events.wait(0.05)
    (event,) = await bench.world.events("version.rejected")
    assert event["reason"] == "it could not be loaded, 5 times in a row: shapes differ"
    assert len(await bench.world.events("version.load_failed")) == bench.heard.failures == 5
    assert bench.serving() == 0


@pytest.mark.parametrize("what", ["version", "storage"])
async def test_weights_that_are_gone_are_waited_for(bench: Bench, what: str) -> None:
    """The wait has no end if the whole storage is missing, because then nothing is known about the version."""
    await bench.swaps.reconcile()
    weights = await bench.commit()
    gone = Path(weights.uri) if what == "version" else bench.directory
    away = gone.rename(gone.with_name(f"{gone.name}-away"))
    async with bench.running():
        async with asyncio.timeout(60):
            while len(await bench.world.events("version.load_failed")) < 5:
                await bench.world.signals.events.wait(0.05)
            rejected = what == "version"
            while rejected and not await bench.world.events("version.rejected"):
                await bench.world.signals.events.wait(0.05)
        if what == "storage":
            away.rename(gone)
            await bench.until(lambda: bench.serving() == 1)
            assert not await bench.world.events("version.rejected")


async def test_the_engine_is_watched_while_a_large_version_is_checked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.swaps.reconcile()
    await bench.commit()
    checked = asyncio.Event()

    class SlowInspector(WeightsInspector):
        async def check(self, weights: WeightsReference, base_model: str) -> None:
            await checked.wait()

    bench.swaps = bench.controller(inspector=SlowInspector(bench.directory))
    monkeypatch.setattr(checks, "PATIENCE_SECONDS", 0.01)
    await bench.swaps.reconcile()
    assert bench.serving() == 0
    bench.engine.down = True
    await bench.swaps.reconcile()
    assert bench.serving() is None
    bench.engine.down = False
    checked.set()
    async with bench.running():
        await bench.until(lambda: bench.serving() == 1)


async def is_rejected_and_replaced(bench: Bench, reason: str) -> None:
    """Assert that version 2, which the engine computes wrongly, is rejected while version 1 serves on."""
    served: set[int | None] = set()
    bench.engine.loading.clear()
    bench.engine.may_load.clear()
    async with bench.running():
        await bench.engine.loading.wait()
        bench.engine.may_load.set()
        while "rejected" not in await bench.states() or bench.engine.label != bench.label(1):
            served.add(bench.serving())
            await bench.world.signals.versions.wait(0.01)
        await bench.until(lambda: bench.serving() == 1)
    assert served <= {1}, "calls go on, and none is told the wrong version"
    assert bench.engine.loads() == [bench.label(1), bench.label(2), bench.label(1)]
    assert await bench.states() == ["retired", "serving", "rejected"]
    (event,) = await bench.world.events("version.rejected")
    assert reason in event["reason"]
    assert event["head"] == 1


@pytest.mark.parametrize("is_float32", [True, False])
async def test_a_version_with_other_figures_than_the_trainers_is_rejected(bench: Bench, is_float32: bool) -> None:
    """An engine in another precision has computed the version before rightly, so its precision is not the cause."""
    bench.engine.is_float32 = is_float32
    await bench.commit(logprob=-1.0)
    await bench.swaps.reconcile()
    assert bench.serving() == 1
    await bench.commit(logprob=-1.2)
    await is_rejected_and_replaced(bench, "probe differ by 0.2 nats per token")


async def test_an_engine_that_never_agreed_with_the_trainer_rejects_nothing(bench: Bench) -> None:
    for _ in range(2):
        await bench.commit(logprob=-1.2)
        await bench.swaps.reconcile()
    assert bench.serving() == 2
    assert await bench.states() == ["retired", "retired", "serving"]
    assert "differ by 0.2 nats" in str(bench.swaps.alert)
    assert len(await bench.world.events("engine.wrong_weights")) == 2


async def test_an_engine_that_took_only_some_of_the_tensors_is_noticed_by_its_checksums(bench: Bench) -> None:
    bench.engine.is_float32 = True
    first = await bench.commit()
    digest = TensorDigests(Path(first.uri)).digest("weight")
    assert digest is not None
    # A tensor that the engine arranges in its own way never counts.
    bench.engine.sums = {"weight": digest, "rearranged": "0" * 16}
    await bench.swaps.reconcile()
    assert bench.serving() == 1
    await bench.commit()
    await is_rejected_and_replaced(bench, "the engine holds other tensors than the files: weight")


async def test_a_version_that_another_proxy_loaded_is_proven_too(bench: Bench) -> None:
    bench.engine.is_float32 = True
    await bench.commit(logprob=-1.0)
    await bench.swaps.reconcile()
    weights = await bench.commit(logprob=-1.2)
    await bench.engine.load_weights(weights.uri, bench.label(2))
    await bench.swaps.reconcile()
    assert await bench.states() == ["retired", "serving", "rejected"]
    assert bench.serving() == 1


@pytest.mark.parametrize(("difference", "state"), [(0.01, "serving"), (0.2, "rejected")])
async def test_rounded_files_may_differ_from_the_trainers_numbers(
    bench: Bench, difference: float, state: str
) -> None:
    bench.engine.is_float32 = True
    await bench.commit(logprob=-1.0)
    await bench.swaps.reconcile()
    weights = publish(bench.directory, {"weight": np.ones(4, np.float16)})
    await bench.commit(weights=weights, logprob=-1.0 - difference)
    await bench.swaps.reconcile()
    assert (await bench.states())[-1] == state
