"""Exports and imports by the command line, with a running proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from proxy.auth.service import PrincipalKind
from proxy.cli.commands import app as command_line
from proxy.cli.console import Refused
from proxy.cli.datasets import DatasetWriter, lines_of
from proxy.http import errors
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.retention import endpoints as keeping_endpoints
from proxy.retention.erasing import EraseService
from proxy.transfer import endpoints as transfer_endpoints
from proxy.transfer.preferences import decode_preference
from proxy.transfer.records import encode
from proxy.transfer.service import TransferService
from tests.database import sqlite_database
from tests.proxy.calls.world import listening
from tests.proxy.store import Store, open_store
from tests.proxy.transfer.test_preferences import preferred
from tests.proxy.transfer.test_service import exported, recorded
from tests.proxy.turns.world import World


class Site:
    """A running proxy; `run` runs a command of `base-rl` with it."""

    def __init__(self, store: Store, address: str, key: str) -> None:
        self.store = store
        self.world = World(store.database, store.clock, store.run)
        self._where = ["--url", address, "--api-key", key]

    async def run(self, *words: str, status: int = 0, answer: str = "") -> str:
        arguments = [*words, *self._where]
        result = await asyncio.to_thread(CliRunner().invoke, command_line, arguments, answer)
        assert result.exit_code == status, result.output
        return result.output


@pytest.fixture
async def site(tmp_path: Path) -> Any:
    (tmp_path / "store").mkdir()
    async with open_store(sqlite_database(tmp_path / "store")) as store:
        app = FastAPI()
        transfer = TransferService(
            database=store.database,
            clock=store.clock,
            signals=store.signals,
            pseudonyms_of=store.credentials.pseudonyms_of,
        )
        erasing = EraseService(store.database, store.runs, store.credentials, store.signals, store.clock)
        provide(app, store.credentials, store.runs, transfer, erasing)
        errors.install(app)
        add_routes(app, transfer_endpoints.router, keeping_endpoints.router)
        key = await store.credentials.create(PrincipalKind.ADMIN)
        async with listening(app) as address:
            yield Site(store, address, key.text)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
async def test_out_and_in_again(site: Site, tmp_path: Path, suffix: str) -> None:
    for _ in range(3):
        await recorded_in(site)
    out = tmp_path / "out"
    told = await site.run("export", "policy", "--out", str(out), "--format", suffix)
    assert "3 sessions with 6 turns" in told
    assert [path.name for path in (out / "data").iterdir()] == [f"train-00000-of-00001.{suffix}"]
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "data"]
    assert "0 sessions imported, 3 were there already" in await site.run("import", str(out), "--run", "policy")
    changed = tmp_path / "changed.jsonl"
    lines = [line.replace(b'"session_id":"ses_', b'"session_id":"old_') for _path, _number, line in lines_of(out)]
    changed.write_bytes(b"\n".join(lines))
    assert "3 sessions imported" in await site.run("import", str(changed), "--run", "policy")
    assert len(await exported(site.world)) == 6
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_bytes(lines[0] + b"\n\n{}\n")
    told = await site.run("import", str(wrong), "--run", "policy", status=1)
    assert "line 3" in told.replace("\n", " ")


async def test_preferences_out_and_in_again(site: Site, tmp_path: Path) -> None:
    one, other = [(await recorded_in(site)).session_id for _ in range(2)]
    await preferred(site.world, one, other, comment="so")
    out = tmp_path / "out"
    assert "1 preferences in 1 files" in await site.run("export", "policy", "--preferences", "--out", str(out))
    ((_, _, line),) = lines_of(out)
    assert decode_preference(line).comment == "so"
    assert "0 preferences imported, 1 were there already" in await site.run("import", str(out), "--run", "policy")
    told = await site.run("import", str(out), "--run", "policy", "--train", status=1)
    assert "holds preferences" in told
    wrong = ["export", "policy", "--preferences", "--out", str(tmp_path / "other")]
    for words, said in ((["--min-reward", "1"], "--since and --until"), (["--format", "parquet"], "JSON lines")):
        assert said in await site.run(*wrong, *words, status=1)


async def test_an_export_that_is_interrupted_leaves_nothing_behind(site: Site, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "no run 'nowhere'" in (await site.run("export", "nowhere", "--out", str(out), status=1)).replace("\n", " ")
    assert not out.exists()
    writer = DatasetWriter(out, suffix="parquet")
    assert not list(out.glob("data/*"))
    writer.abandon()
    assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(Refused, match="not empty"):
        DatasetWriter(out, suffix="jsonl")


async def test_large_exports_are_several_files(site: Site, tmp_path: Path) -> None:
    record = await recorded_in(site)
    for suffix in ("jsonl", "parquet"):
        writer = DatasetWriter(tmp_path / suffix, suffix=suffix, shard_bytes=1)
        for _ in range(3):
            writer.add(encode(record).rstrip())
        names = [path.name for path in writer.finish("policy")]
        assert names == [f"train-{index:05}-of-00003.{suffix}" for index in range(3)]
        assert len(list(lines_of(tmp_path / suffix))) == 3


@pytest.mark.filterwarnings("ignore")
async def test_hugging_face_datasets_loads_it(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    record = await recorded_in(site)
    out = tmp_path / "out"
    await site.run("export", "policy", "--out", str(out))
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    (row,) = loaded["train"]
    assert row["session_id"] == record.session_id
    assert [message["role"] for message in row["messages"]] == [message["role"] for message in record.messages]
    assert [turn["output_ids"] for turn in row["turns"]] == [list(turn.output_ids) for turn in record.turns]
    assert row["reward"] == record.reward


async def test_a_user_is_erased_after_a_question(site: Site) -> None:
    record = await recorded_in(site)
    session = ["erase", "--session", record.session_id]
    assert "1 would be erased" in await site.run(*session, "--dry-run")
    await site.run(*session, status=1, answer="n\n")
    assert len(await exported(site.world)) == 1
    assert "1 sessions with 2 turns found, 1 erased" in await site.run(*session, "--yes")
    assert await exported(site.world) == []
    await site.run("erase", status=2)


async def recorded_in(site: Site) -> Any:
    return await recorded(site.world)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
