"""Several engines for several runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.contract.policy import weight_label
from proxy.contract.states import RunState
from proxy.engines.activity import EngineActivity
from proxy.errors import EngineUnavailable
from proxy.runs.repository import RunRepository
from proxy.runs.service import RunView
from proxy.serving.configured import EngineSpec
from proxy.serving.pool import EnginePool
from proxy.serving.registry import EngineRegistry
from proxy.settings import EngineSettings, RunSettings
from proxy.versions.steering import Decision
from tests.fakes.engine import FakeEngine
from tests.proxy.tokens.models import write_model
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, inspector, publish, steering_of, versions_of


class NamedEngine(FakeEngine):
    """An engine of the base model at an address of its own."""

    def __init__(self, name: str, model: str) -> None:
        super().__init__(lambda _request: (), model_path=model)
        self._name = name
        self.refused: str | None = None
        self.is_loading = False
        self.may_load = asyncio.Event()
        self.may_load.set()

    @property
    def name(self) -> str:
        return f"fake://{self._name}"

    async def load_weights(self, path: str, label: str) -> None:
        if self.refused is not None:
            raise EngineUnavailable(self.refused)
        self.is_loading = True
        await self.may_load.wait()
        self.is_loading = False
        await super().load_weights(path, label)


class Bench:
    """A pool over a store. `engines` are its engines by name."""

    def __init__(self, world: World, specs: Sequence[EngineSpec]) -> None:
        self.world = world
        self.engines = {spec.name: NamedEngine(spec.name, spec.base_model) for spec in specs}
        self.registry = EngineRegistry(
            database=world.database, signals=world.signals, clock=world.clock, specs=specs, interval_seconds=0.01
        )
        self.pool = EnginePool(
            registry=self.registry,
            make_engine=lambda url: self.engines[url.removeprefix("fake://")],
            settings=EngineSettings(health_interval_seconds=0.01),
            database=world.database,
            runs=world.runs,
            signals=world.signals,
            clock=world.clock,
            inspector=inspector(),
            activity=EngineActivity(),
            declared=[world.run.name],
        )

    def engines_of(self, run: RunView) -> set[str]:
        """The names of the engines that take calls of the run, found by the calls of many sessions."""
        places = [self.pool.find_place(run.id, f"ses_{number}") for number in range(64)]
        return {place.engine.name.removeprefix("fake://") for place in places if place is not None}

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not reached():
                await self.pool.refresh()
                await self.world.signals.versions.wait(0.01)


@asynccontextmanager
async def pool_of(world: World, *specs: EngineSpec) -> AsyncIterator[Bench]:
    bench = Bench(world, specs)
    await bench.registry.register()
    await bench.pool.refresh()
    bench.pool.start()
    try:
        yield bench
    finally:
        await bench.pool.aclose()


async def commit(world: World, directory: Path, parent: int) -> None:
    """Commit a version of the world's run after `parent`, which is the head."""
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    await world.ready()
    batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=1, max_staleness=100))
    assert batch.claim_id is not None
    await versions_of(world).commit(world.run, commit_request([batch.claim_id], parent, publish(directory)))


def spec(name: str, base_model: str = "base/model", run: str | None = None) -> EngineSpec:
    return EngineSpec(name=name, url=f"fake://{name}", base_model=base_model, run=run)


async def test_one_run_on_one_engine(world: World) -> None:
    async with pool_of(world, spec("a")) as bench:
        assert (bench.pool.ready, bench.pool.serving(world.run_id)) == (False, None)
        before = bench.pool.problem
        assert before is not None
        await bench.until(lambda: bench.pool.ready)
        assert bench.pool.serving(world.run_id) == 0
        assert bench.engines_of(world.run) == {"a"}
        assert bench.pool.problem is None, "it serves now"
        assert not bench.pool.problems()


async def test_sessions_of_a_run_are_spread_over_its_engines_and_stay(world: World) -> None:
    async with pool_of(world, spec("a"), spec("b")) as bench:
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b"})
        first = bench.pool.find_place(world.run_id, "ses_1")
        assert all(bench.pool.find_place(world.run_id, "ses_1") is first for _ in range(10))


async def test_an_engine_that_is_down_takes_no_call_until_it_is_back(world: World) -> None:
    async with pool_of(world, spec("a"), spec("b")) as bench:
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b"})
        down = bench.engines["a"]
        down.down = True
        bench.pool.recheck_engine(down)
        await bench.until(lambda: bench.engines_of(world.run) == {"b"})
        assert bench.pool.ready
        assert any("fake://a accepts no calls" in line for line in bench.pool.problems())
        down.down, down.label = False, "default"
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b"})


async def test_another_place_is_never_the_one_that_was_lost(world: World) -> None:
    async with pool_of(world, spec("a"), spec("b")) as bench:
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b"})
        lost = bench.pool.find_place(world.run_id, "ses_1")
        assert lost is not None
        other = bench.pool.another_place(world.run_id, lost)
        assert other is not None
        assert other.engine is not lost.engine
        for engine in bench.engines.values():
            engine.down = engine is other.engine
            bench.pool.recheck_engine(engine)
        await bench.until(lambda: len(bench.engines_of(world.run)) == 1)
        assert bench.pool.another_place(world.run_id, lost) is None


async def test_every_run_has_an_engine_of_its_own_and_one_run_waits(world: World) -> None:
    second = await world.runs.ensure(RunSettings(name="second", model="base/model"))
    third = await world.runs.ensure(RunSettings(name="third", model="base/model"))
    async with pool_of(world, spec("a"), spec("b")) as bench:
        await bench.until(lambda: bench.pool.serving(second.id) == 0 and bench.pool.serving(world.run_id) == 0)
        assert (bench.engines_of(world.run), bench.engines_of(second)) == ({"a"}, {"b"})
        assert bench.engines["b"].label == weight_label(second.id, 0)
        assert bench.pool.find_place(third.id, "ses_1") is None
        assert [(view.name, view.state, view.versions) for view in bench.pool.views()] == [
            ("a", "ready", {world.run.name: 0}),
            ("b", "ready", {"second": 0}),
        ]
        assert "no engine is free for the run 'third' on base/model: add one" in bench.pool.unserved_reason(third)
        assert bench.pool.problems() == [], "the configuration does not have the run"
        # An archived run frees its engine.
        await world.database.commit(
            lambda connection: RunRepository(connection).set_state(
                second.id, RunState.ARCHIVED, among=[RunState.ACTIVE]
            )
        )
        await bench.until(lambda: bench.pool.serving(third.id) == 0)
        assert bench.pool.serving(second.id) is None
        assert bench.engines["b"].label == weight_label(third.id, 0)


async def test_after_a_rollback_calls_go_to_the_engine_that_has_gone_back(world: World, tmp_path: Path) -> None:
    async with pool_of(world, spec("a"), spec("b")) as bench:
        for parent in range(2):
            await commit(world, tmp_path, parent)
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b"} and bench.pool.serving(world.run_id) == 2)
        bench.engines["b"].refused = "not now"
        decision = Decision(reason="worse", by="key_1")
        await steering_of(world).roll_back(world.run, 1, decision, leave_out_sessions=False)
        await bench.until(lambda: bench.pool.serving(world.run_id) == 1)
        assert bench.engines_of(world.run) == {"a"}, "the other one still has the newer version"
        bench.engines["b"].refused = None
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b"})
        assert {engine.label for engine in bench.engines.values()} == {weight_label(world.run_id, 1)}


async def test_one_engine_loads_a_version_while_the_others_serve(world: World, tmp_path: Path) -> None:
    async with pool_of(world, spec("a"), spec("b"), spec("c")) as bench:
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b", "c"})
        loading = dict(bench.engines)
        for engine in loading.values():
            engine.may_load.clear()
        await commit(world, tmp_path, 0)
        served = [bench.engines_of(world.run)]
        while loading:
            await bench.until(lambda: any(engine.is_loading for engine in loading.values()))
            (name,) = [name for name, engine in loading.items() if engine.is_loading]
            served.append(bench.engines_of(world.run))
            assert name not in served[-1], "an engine that loads gets no new calls"
            loading.pop(name).may_load.set()
            await bench.until(lambda: bench.engines_of(world.run) >= {name})  # noqa: B023  (called at once)
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b", "c"})
        assert all(served)
        assert len(served[1]) == 2
        assert bench.pool.serving(world.run_id) == 1


async def test_an_engine_changes_its_run_only_when_the_calls_of_the_old_one_have_ended(world: World) -> None:
    async with pool_of(world, spec("a"), spec("b")) as bench:
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b"})
        places = [bench.pool.find_place(world.run_id, f"ses_{number}") for number in range(64)]
        place = next(place for place in places if place is not None and place.engine.name == "fake://b")
        place.begin(100)
        second = await world.runs.ensure(RunSettings(name="second", model="base/model"))
        for _ in range(5):
            await bench.pool.refresh()
        assert bench.engines_of(world.run) == {"a"}, "no new call goes to the engine that changes"
        assert bench.pool.serving(second.id) is None
        assert bench.engines["b"].label == weight_label(world.run_id, 0)
        place.end(100)
        await bench.until(lambda: bench.pool.serving(second.id) == 0)
        assert bench.engines["b"].label == weight_label(second.id, 0)


async def test_a_dedicated_engine_serves_its_run_alone(world: World) -> None:
    second = await world.runs.ensure(RunSettings(name="second", model="base/model"))
    async with pool_of(world, spec("a", run="second"), spec("b", run="second")) as bench:
        await bench.until(lambda: bench.engines_of(second) == {"a", "b"})
        assert bench.pool.serving(world.run_id) is None
        assert any(f"no engine is free for the run {world.run.name!r}" in line for line in bench.pool.problems())


async def test_an_engine_of_another_base_model_is_refused_with_what_to_do(world: World, tmp_path: Path) -> None:
    ours, theirs = write_model(tmp_path / "ours"), write_model(tmp_path / "theirs")
    (theirs / "tokenizer.json").write_text((theirs / "tokenizer.json").read_text() + "\n")
    run = await world.runs.ensure(RunSettings(name="other", model=str(ours)))
    async with pool_of(world, spec("a", run.base_model)) as bench:
        bench.engines["a"].model_path = str(theirs)
        await bench.until(lambda: any("tokenizer.json differs" in line for line in bench.pool.problems()))
        assert bench.pool.serving(run.id) is None
        assert "start it with that model, or take it out of the pool" in bench.pool.unserved_reason(run)
        assert bench.engines["a"].label == "default", "nothing was loaded into it"


@pytest.mark.parametrize("failing", ["a", "b"])
async def test_an_engine_that_is_behind_takes_no_call(world: World, failing: str, tmp_path: Path) -> None:
    async with pool_of(world, spec("a"), spec("b")) as bench:
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b"})
        bench.engines[failing].refused = "it cannot load now"
        await commit(world, tmp_path, 0)
        await bench.until(lambda: bench.pool.serving(world.run_id) == 1)
        assert bench.engines_of(world.run) == {"a", "b"} - {failing}
        assert {view.name: view.state for view in bench.pool.views()}[failing] in ("behind", "not_ready")
        async with asyncio.timeout(30):
            while (await world.current_run()).serving_version != 1:  # recorded a moment after it is served
                await asyncio.sleep(0.01)
        for _ in range(5):
            await asyncio.sleep(0.01)
            assert bench.pool.serving(world.run_id) == 1
        assert (await world.current_run()).serving_version == 1, "the engine that is behind does not put it back"
        bench.engines[failing].refused = None
        await bench.until(lambda: bench.engines_of(world.run) == {"a", "b"})
