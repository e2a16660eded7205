"""The run that an installation continues, and that none is created by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.cli.stored_runs import StoredRun, chosen_run, stored_runs
from proxy.clock import system_clock
from proxy.database import migrate
from proxy.database.unit_of_work import Database
from proxy.runs.service import RunDirectory
from proxy.settings import ConfigurationError, RunSettings, Settings, load_settings

SHOP, TRAVEL = StoredRun(name="shop", base_model="/m/a"), StoredRun(name="travel", base_model="/m/b")


def settings(tmp_path: Path, **run: str) -> Settings:
    return load_settings(None, {"server": {"data_dir": tmp_path}, "run": run})


async def test_the_runs_of_a_store_are_read_before_a_proxy_is_there(tmp_path: Path) -> None:
    mine = settings(tmp_path)
    assert stored_runs(mine) == ()
    migrate.upgrade(mine.database_url)
    assert stored_runs(mine) == ()
    database = Database(mine.database_url)
    try:
        await RunDirectory(database, system_clock).ensure(RunSettings(name="shop", model="org/model"))
    finally:
        await database.aclose()
    assert stored_runs(mine) == (StoredRun(name="shop", base_model="org/model"),)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".partial"]


def test_a_store_that_cannot_be_read_is_left_to_the_proxy(tmp_path: Path) -> None:
    (tmp_path / "base-rl.sqlite3").write_bytes(b"not a database" * 100)
    assert stored_runs(settings(tmp_path)) == ()


def test_the_only_run_continues_without_being_named(tmp_path: Path) -> None:
    run = chosen_run(settings(tmp_path), (SHOP,), named=False)
    assert (run.name, run.model) == ("shop", "/m/a")
    named = chosen_run(settings(tmp_path, name="shop", model="/m/other"), (SHOP,), named=True)
    assert (named.name, named.model) == ("shop", "/m/other")  # which the proxy refuses: a run keeps its base model


def test_an_empty_store_takes_any_name(tmp_path: Path) -> None:
    assert chosen_run(settings(tmp_path, name="new"), (), named=True).name == "new"
    assert chosen_run(settings(tmp_path), (), named=False).name == "policy"


def test_a_misspelt_run_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has the run 'shop', and none called 'shpo': leave --run out"):
        chosen_run(settings(tmp_path, name="shpo"), (SHOP,), named=True)
    with pytest.raises(ConfigurationError, match=r"has the runs shop, travel, and none called 'shpo'"):
        chosen_run(settings(tmp_path, name="shpo"), (SHOP, TRAVEL), named=True)


def test_one_of_several_runs_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="several runs: shop, travel; say which with --run"):
        chosen_run(settings(tmp_path), (SHOP, TRAVEL), named=False)
    assert chosen_run(settings(tmp_path, name="travel"), (SHOP, TRAVEL), named=True).model == "/m/b"


def test_a_store_that_is_shared_may_begin_another_run(tmp_path: Path) -> None:
    shared = load_settings(
        None, {"database": {"url": "postgresql://h/d"}, "run": {"name": "new"}, "server": {"data_dir": tmp_path}}
    )
    assert chosen_run(shared, (SHOP,), named=True).name == "new"
