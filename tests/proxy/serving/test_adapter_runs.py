"""Runs whose versions are adapters that one engine holds beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.contract.policy import Probe, WeightsFormat, WeightsReference, weight_label
from proxy.database.tables import EventRow
from proxy.engines.protocol import EngineChunk, LabelSpan
from proxy.runs.service import RunView
from proxy.serving import adapter_runs
from proxy.settings import RunSettings
from proxy.versions.steering import Decision
from tests.proxy.serving.test_pool import Bench, pool_of, spec
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, publish, steering_of, versions_of

IDS = (3, 1, 4, 1)


@pytest.fixture
async def bench(world: World) -> AsyncIterator[Bench]:
    """A pool with one engine for adapter runs, and one for the store's own run."""
    async with pool_of(world, spec("a", "shared/model"), spec("own")) as opened:
        yield opened


async def adapter_run(world: World, name: str) -> RunView:
    return await world.runs.ensure(RunSettings(name=name, model="shared/model", weights="adapter"))


async def commit(world: World, run: RunView, directory: Path, *, logprob: float | None) -> WeightsReference:
    """Commit an adapter whose probe has this log-probability for every token."""
    runs_world = World(world.database, world.clock, run)
    runs_world.signals = world.signals
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    await runs_world.ready()
    batch = await claims.claim(run, ClaimRequest(trainer="t", want=1, max_staleness=100))
    assert batch.claim_id is not None
    weights = publish(directory, form=WeightsFormat.ADAPTER)
    versions = versions_of(world)
    head = await versions.head(run)
    probe = None if logprob is None else Probe(ids=IDS, logprobs=(logprob,) * (len(IDS) - 1))
    request = msgspec.structs.replace(commit_request([batch.claim_id], head.version, weights), probe=probe)
    await versions.commit(run, request)
    return weights


async def events(world: World, kind: str) -> list[dict[str, object]]:
    rows = await world.database.read(
        lambda connection: connection.execute(select(EventRow.data).where(EventRow.kind == kind)).all()
    )
    return [row.data for row in rows]


async def test_two_runs_share_an_engine_each_with_its_own_adapter(bench: Bench, tmp_path: Path) -> None:
    world, engine = bench.world, bench.engines["a"]
    runs = [await adapter_run(world, name) for name in ("first", "second")]
    await bench.until(lambda: all(bench.pool.serving(run.id) == 0 for run in runs))
    assert engine.label == "default", "the base model is everybody's, and keeps the engine's own label"
    for run in runs:
        place = bench.pool.find_place(run.id)
        assert place is not None
        assert place.adapter is None
        chunk = EngineChunk(output_ids=(1,), logprobs=(-0.5,), spans=(LabelSpan(label="default", start=0, end=1),))
        assert place.labelled(chunk).spans[0].label == weight_label(run.id, 0)
    for number, run in enumerate(runs):
        weights = await commit(world, run, tmp_path, logprob=-2.0 - number)
        engine.scores[weights.uri] = -2.0 - number
    await bench.until(lambda: all(bench.pool.serving(run.id) == 1 for run in runs) and bench.pool.problem is None)
    places = [bench.pool.find_place(run.id) for run in runs]
    assert [place and place.adapter for place in places] == [weight_label(run.id, 1) for run in runs]
    assert not [call for call in engine.calls if call[0] == "pause"], "generation never stands still"
    async with asyncio.timeout(30):
        while [(await world.runs.by_id(run.id)).serving_version for run in runs] != [1, 1]:
            await asyncio.sleep(0.01)  # recorded a moment after it is served
    assert not bench.pool.problems()


async def test_an_old_adapter_is_unloaded_when_nothing_uses_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_runs, "_RETIRED_SECONDS", 0.0)  # no other proxy still names it
    world, engine = bench.world, bench.engines["a"]
    run = await adapter_run(world, "first")
    left = weight_label(run.id, 7)
    engine.loras[left] = "left by an earlier process"
    other = engine.loras["run_other@3"] = "another run's"
    await commit(world, run, tmp_path, logprob=None)
    await bench.until(lambda: bench.pool.serving(run.id) == 1)
    old = bench.pool.find_place(run.id)
    assert old is not None
    old.begin(10)
    await commit(world, run, tmp_path, logprob=None)
    await bench.until(lambda: bench.pool.serving(run.id) == 2)
    await bench.until(lambda: left not in engine.loras)
    assert old.adapter in engine.loras, "a call still uses it"
    old.end(10)
    await bench.until(lambda: old.adapter not in engine.loras)
    assert engine.loras["run_other@3"] == other
    assert weight_label(run.id, 2) in engine.loras


async def test_a_rollback_names_the_older_adapter_again(bench: Bench, tmp_path: Path) -> None:
    world, engine = bench.world, bench.engines["a"]
    run = await adapter_run(world, "first")
    for version in (1, 2):
        await commit(world, run, tmp_path, logprob=None)
        await bench.until(lambda version=version: bench.pool.serving(run.id) == version)  # type: ignore[misc]
    decision = Decision(reason="worse", by="key_1")
    await steering_of(world).roll_back(run, 1, decision, leave_out_sessions=False)
    await bench.until(lambda: bench.pool.serving(run.id) == 1)
    place = bench.pool.find_place(run.id)
    assert place is not None
    assert place.adapter == weight_label(run.id, 1)
    assert place.adapter in engine.loras


async def test_an_engine_that_ignores_the_adapters_name_is_caught_and_serves_what_it_did(
    bench: Bench, tmp_path: Path
) -> None:
    world, engine = bench.world, bench.engines["a"]
    run = await adapter_run(world, "first")
    await bench.until(lambda: bench.pool.serving(run.id) == 0)
    engine.ignores_adapters = True
    weights = await commit(world, run, tmp_path, logprob=-2.0)
    engine.scores[weights.uri] = -2.0
    await bench.until(lambda: any("other weights" in line for line in bench.pool.problems()))
    assert bench.pool.serving(run.id) == 0
    place = bench.pool.find_place(run.id)
    assert place is not None
    assert place.adapter is None
    await bench.until(lambda: weight_label(run.id, 1) not in engine.loras)
    (event,) = await events(world, "engine.wrong_weights")
    assert (event["engine"], event["version"]) == ("fake://a", 1)
    engine.ignores_adapters = False
    await bench.until(lambda: bench.pool.serving(run.id) == 1)
    assert not bench.pool.problems()


async def test_a_restarted_engine_gets_the_adapter_again(bench: Bench, tmp_path: Path) -> None:
    world, engine = bench.world, bench.engines["a"]
    run = await adapter_run(world, "first")
    await commit(world, run, tmp_path, logprob=None)
    await bench.until(lambda: bench.pool.serving(run.id) == 1)
    engine.loras.clear()
    bench.pool.recheck_engine(engine)  # as after a call that the engine refused
    await bench.until(lambda: weight_label(run.id, 1) in engine.loras)
    assert bench.pool.serving(run.id) == 1


async def test_an_engine_without_named_adapters_is_refused_with_what_to_do(bench: Bench) -> None:
    bench.engines["a"].named_adapters = False
    run = await adapter_run(bench.world, "first")
    await bench.until(lambda: any("start SGLang with --enable-lora" in line for line in bench.pool.problems()))
    assert bench.pool.serving(run.id) is None
