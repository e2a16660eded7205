"""Runs that begin from a version of another run."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.contract.policy import PruneRequest, WeightsFormat
from proxy.database.tables import PolicyVersionRow, RunRow
from proxy.errors import InvalidRequest, WeightsMissing, WeightsRejected
from proxy.runs.management import RunManagement
from proxy.runs.service import RunDirectory
from proxy.settings import ConfigurationError, RunSettings
from proxy.versions.rejections import Rejections
from proxy.versions.repository import VersionRepository
from proxy.versions.retention import WeightRetention
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import fit_request, inspector, publish, versions_of


def management_of(world: World) -> RunManagement:
    async def check(base_model: str, settings: RunSettings) -> None:
        assert base_model, settings

    async def apply_rules() -> None:
        assert await world.runs.list_()

    return RunManagement(
        database=world.database,
        runs=world.runs,
        signals=world.signals,
        clock=world.clock,
        check=check,
        apply_rules=apply_rules,
        check_weights=inspector().check,
    )


async def commit(world: World, directory: Path, parent: int) -> str:
    """Commit the successor of `parent` and return its directory."""
    weights = publish(directory)
    await versions_of(world).commit(world.run, fit_request((), parent, weights))
    return weights.uri


async def test_version_0_is_the_version_of_the_other_run(world: World, tmp_path: Path) -> None:
    uri = await commit(world, tmp_path, 0)
    await commit(world, tmp_path, 1)
    run = await management_of(world).create("next", None, {}, begin_from="policy@1")
    assert (run.begun_from, run.base_model, run.head_version) == ("policy@1", world.run.base_model, 0)
    head = await versions_of(world).head(run)
    assert head.weights is not None
    assert (head.version, head.weights.uri) == (0, uri)
    (listed,) = await versions_of(world).list_(run)
    assert (listed.begun_from, listed.parent) == ("policy@1", None)
    created = (await world.events("run.created"))[-1]
    assert created == {"name": "next", "base_model": world.run.base_model, "begun_from": "policy@1"}
    again = await management_of(world).create("third", None, {}, begin_from="next@0")
    assert (again.begun_from, (await versions_of(world).head(again)).weights) == ("next@0", head.weights)


async def test_a_run_may_begin_from_a_base_model(world: World) -> None:
    run = await management_of(world).create("next", world.run.base_model, {}, begin_from="policy@0")
    assert (run.begun_from, (await versions_of(world).head(run)).weights) == ("policy@0", None)


async def test_retention_leaves_the_weights_from_which_another_run_begins(world: World, tmp_path: Path) -> None:
    uris = [await commit(world, tmp_path, parent) for parent in range(4)]
    run = await management_of(world).create("next", None, {}, begin_from="policy@2")
    retention = WeightRetention(database=world.database, clock=world.clock, signals=world.signals)
    prune = PruneRequest(keep=1, present=tuple(uris))
    assert (await retention.prune(world.run, prune)).remove == (uris[0], uris[2])
    # The new run's own trainer may name the shared directory too, and must not remove it either.
    await versions_of(world).commit(run, fit_request((), 0, publish(tmp_path)))
    await versions_of(world).commit(run, fit_request((), 1, publish(tmp_path)))
    assert (await retention.prune(await world.runs.by_id(run.id), prune)).remove == ()


async def test_versions_from_which_no_run_can_begin_are_refused(world: World, tmp_path: Path) -> None:
    uris = [await commit(world, tmp_path, parent) for parent in range(3)]
    rejections = Rejections(database=world.database, signals=world.signals, clock=world.clock, run_id=world.run.id)
    await rejections.reject(2, "engines died of it")
    await world.database.commit(
        lambda connection: VersionRepository(connection).mark_removed(world.run.id, [1], now=1.0)
    )
    management = management_of(world)
    for version, reason in ((1, "were removed"), (2, "engines died of it"), (9, "no version policy@9")):
        with pytest.raises(InvalidRequest, match=reason) as refused:
            await management.create("next", None, {}, begin_from=f"policy@{version}")
        assert refused.value.param == "from"
        assert "the newest good version of that run is 3" in refused.value.message
    Path(uris[2], "model.safetensors").write_bytes(b"damaged")
    with pytest.raises((WeightsRejected, WeightsMissing)):
        await management.create("next", None, {}, begin_from="policy@3")
    with pytest.raises(InvalidRequest, match="has the base model"):
        await management.create("next", "another/model", {}, begin_from="policy@0")
    with pytest.raises(InvalidRequest, match="of the kind weights = 'full'"):
        await management.create("next", None, {"weights": "adapter"}, begin_from="policy@0")
    assert len(await world.rows(RunRow)) == 1


async def test_weights_that_are_removed_after_their_check_leave_no_run(world: World, tmp_path: Path) -> None:
    uri = await commit(world, tmp_path, 0)
    await commit(world, tmp_path, 1)
    retention = WeightRetention(database=world.database, clock=world.clock, signals=world.signals)

    async def removed_meanwhile(*_: object) -> None:
        assert (await retention.prune(world.run, PruneRequest(keep=1, present=(uri,)))).remove == (uri,)

    runs = RunDirectory(world.database, world.clock, removed_meanwhile)
    declared = RunSettings.model_validate({"name": "next", "model": world.run.base_model, "from": "policy@1"})
    with pytest.raises(InvalidRequest, match="were removed"):
        await runs.ensure(declared)
    assert len(await world.rows(RunRow)) == 1


async def test_a_declared_run_reads_its_beginning_only_when_it_is_created(world: World, tmp_path: Path) -> None:
    await commit(world, tmp_path, 0)
    runs = RunDirectory(world.database, world.clock, inspector().check)
    declared = {"name": "next", "model": world.run.base_model, "from": "policy@1"}
    created = await runs.ensure(RunSettings.model_validate(declared))
    later = await runs.ensure(RunSettings.model_validate(declared | {"from": "gone@7", "max_new_tokens": 5}))
    assert (later.id, later.begun_from, later.settings.max_new_tokens) == (created.id, "policy@1", 5)
    assert await world.events("run.configured") == [{"changed": ["max_new_tokens"]}]
    for wrong, reason in (
        ({"from": "gone@7"}, "there is no run 'gone'"),
        ({"weights": "adapter"}, "of the kind weights = 'full'"),
        ({"model": "another/model"}, "has the base model"),
    ):
        with pytest.raises(ConfigurationError, match=f"the run 'third': from: .*{reason}"):
            await runs.ensure(RunSettings.model_validate(declared | {"name": "third"} | wrong))


async def test_an_adapter_run_takes_the_kind_of_weights_from_the_other_run(world: World, tmp_path: Path) -> None:
    runs = RunDirectory(world.database, world.clock)
    source = await runs.ensure(RunSettings(name="first", model=world.run.base_model, weights="adapter"))
    weights = publish(tmp_path, form=WeightsFormat.ADAPTER)
    await versions_of(world).commit(source, fit_request((), 0, weights))
    run = await management_of(world).create("next", None, {}, begin_from="first@1")
    assert run.settings.weights == "adapter"
    (row,) = [row for row in await world.rows(PolicyVersionRow) if row.run_id == run.id]
    assert (row.weights_format, row.weights_files) == ("adapter", weights.files)
