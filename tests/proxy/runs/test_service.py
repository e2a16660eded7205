from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select, update

from proxy.database.tables import EventRow, PolicyVersionRow, RunRow
from proxy.errors import ModelNotFound, NotFound
from proxy.runs.service import RunDirectory
from proxy.settings import ConfigurationError, RunSettings
from tests.proxy.store import Store


async def test_a_new_run_begins_with_version_0_serving(store: Store) -> None:
    versions, events = await store.database.read(
        lambda connection: (
            connection.execute(select(PolicyVersionRow.__table__)).all(),
            connection.execute(select(EventRow.kind, EventRow.data)).all(),
        )
    )
    assert [(row.run_id, row.version, row.state, row.weights_uri) for row in versions] == [
        (store.run.id, 0, "serving", None)
    ]
    assert versions[0].served_at == store.clock.now
    assert [tuple(event) for event in events] == [
        ("run.created", {"name": "policy", "base_model": "base/model"}),
    ]


async def test_ensuring_again_is_the_same_run_with_the_new_settings(store: Store) -> None:
    again = await store.runs.ensure(RunSettings(name="policy", model="base/model", lease_seconds=7))
    assert again.id == store.run.id
    assert (await store.runs.by_id(again.id)).settings.lease_seconds == 7
    assert len(await store.runs.list_()) == 1
    kinds = await store.database.read(
        lambda connection: connection.execute(select(EventRow.kind, EventRow.data).order_by(EventRow.id)).all()
    )
    assert tuple(kinds[-1]) == ("run.configured", {"changed": ["lease_seconds"]})


async def test_an_unnamed_run_is_not_created_beside_others(store: Store) -> None:
    await store.runs.ensure(RunSettings(model="base/model"))  # its name is policy, like that of the existing run
    other = await store.runs.ensure(RunSettings(name="other", model="base/model"))
    await store.database.commit(
        lambda connection: connection.execute(update(RunRow).where(RunRow.id == store.run.id).values(name="shop"))
    )
    with pytest.raises(ConfigurationError, match=r"no run 'policy'; it has shop, other"):
        await store.runs.ensure(RunSettings(model="base/model"))
    assert [run.id for run in await store.runs.list_()] == [store.run.id, other.id]


async def test_another_base_model_is_refused_with_a_remedy(store: Store) -> None:
    with pytest.raises(ConfigurationError, match=r"base/model.*choose another run\.name"):
        await store.runs.ensure(RunSettings(name="policy", model="other/model"))


async def test_a_run_without_a_model_is_refused_with_a_remedy(store: Store) -> None:
    with pytest.raises(ConfigurationError, match="BASE_RL_RUN__MODEL"):
        await store.runs.ensure(RunSettings(name="nameless"))


async def test_a_directory_is_known_by_its_absolute_path(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    relative = await store.runs.ensure(RunSettings(name="local", model="model"))
    absolute = await store.runs.ensure(RunSettings(name="local", model=str(tmp_path / "model")))
    assert relative.base_model == absolute.base_model == str(tmp_path / "model")


async def test_versions_are_read_again_every_time(store: Store) -> None:
    await store.database.commit(
        lambda connection: connection.execute(update(RunRow).values(head_version=3, serving_version=2))
    )
    run = await store.runs.by_name("policy")
    assert (run.head_version, run.serving_version) == (3, 2)


async def test_settings_changed_by_another_process_are_seen(store: Store) -> None:
    other = RunDirectory(store.database, store.clock)
    await other.ensure(RunSettings(name="policy", model="base/model", max_new_tokens=5))
    assert (await store.runs.by_name("policy")).settings.max_new_tokens == 5


async def test_unknown_runs(store: Store) -> None:
    with pytest.raises(ModelNotFound) as error:
        await store.runs.by_name("nobody")
    assert error.value.param == "model"
    with pytest.raises(NotFound):
        await store.runs.by_id("run_nobody")
    with pytest.raises(NotFound):
        await store.runs.by_name_or_id("nobody")
    assert (await store.runs.by_name_or_id(store.run.id)).name == "policy"
    assert (await store.runs.by_name_or_id("policy")).id == store.run.id
