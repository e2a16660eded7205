"""`base-rl runs …` against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner, Result

from proxy.app import create_app
from proxy.cli.commands import app as command_line
from proxy.cli.local_keys import load_or_make
from proxy.cli.stack import Address
from proxy.settings import BootstrapSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.overview.serving import serving_app
from tests.proxy.tokens.models import write_model


class Installation:
    def __init__(self, data_dir: Path, model: Path) -> None:
        self.data_dir = data_dir
        self.model = str(model)

    async def run(self, *arguments: str, status: int = 0, typed: str | None = None) -> Result:
        runner = CliRunner(env={"COLUMNS": "200", "BASE_RL_ADMIN_KEY": ""})
        command = ["runs", *arguments, "--data-dir", str(self.data_dir)]
        result = await asyncio.to_thread(runner.invoke, command_line, command, input=typed)
        assert result.exit_code == status, result.output
        return result


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Installation]:
    data_dir = tmp_path / "data"
    model = write_model(tmp_path / "model")
    keys = load_or_make(data_dir)
    settings = Settings(
        server=ServerSettings(data_dir=data_dir),
        bootstrap=BootstrapSettings(admin_key=SecretStr(keys.admin_key)),
        run=RunSettings(name="policy", model=str(model)),
    )
    app = create_app(settings, engine=FakeEngine(lambda _request: [5, 6, 2], model_path=str(model)))
    async with app.router.lifespan_context(app), serving_app(app) as address:
        (data_dir / "address.json").write_bytes(msgspec.json.encode(Address(url=address, pid=os.getpid())))
        yield Installation(data_dir, model)


async def test_a_run_from_its_creation_to_its_deletion(here: Installation) -> None:
    settings = ("--set", "max_new_tokens=64", "--set", "limits.max_waiting=8", "--set", 'trainer={"seed": 3}')
    made = await here.run("create", "shop", "--model", here.model, *settings)
    assert "base-rl keys create --kind run --run shop" in made.stderr
    shown = (await here.run("show", "shop")).stdout
    for line in (
        "state +active",
        "max_new_tokens +64",
        "limits.max_waiting +8",
        "trainer.seed +3",
        "version +0 serves",
    ):
        assert re.search(rf"^{line}", shown, re.MULTILINE), line
    changed = json.loads(
        (await here.run("set", "shop", "max_new_tokens=null", "limits.max_waiting=9", "--json")).stdout
    )
    assert changed["settings"]["max_new_tokens"] == RunSettings().max_new_tokens
    assert changed["settings"]["limits"]["max_waiting"] == 9
    copy = json.loads((await here.run("clone", "shop", "copy", "--set", "lease_seconds=5", "--json")).stdout)
    assert (copy["name"], copy["settings"]["lease_seconds"], copy["settings"]["trainer"]) == ("copy", 5, {"seed": 3})
    for change, state in (
        ("pause", "paused"),
        ("resume", "active"),
        ("archive", "archived"),
        ("unarchive", "active"),
    ):
        confirmation = ("--yes",) if change == "archive" else ()
        assert json.loads((await here.run(change, "shop", *confirmation, "--json")).stdout)["state"] == state
    assert "the run shop is paused" in (await here.run("pause", "shop", "--reason", "a bad batch")).stdout
    listed = (await here.run("list")).stdout
    assert re.search(r"^shop +paused", listed, re.MULTILINE)
    assert "shop is deleted" in (await here.run("delete", "shop", "--yes", "shop")).stdout
    assert [run["name"] for run in json.loads((await here.run("list", "--json")).stdout)] == ["policy", "copy"]


async def test_archiving_and_deleting_ask_first(here: Installation) -> None:
    await here.run("create", "shop", "--model", here.model)
    asked = await here.run("archive", "shop", status=1, typed="n\n")
    assert "shop" in asked.output
    assert "Aborted" in asked.output
    asked = await here.run("delete", "shop", status=1, typed="policy\n")
    assert "0 sessions, 0 turns" in asked.output
    assert "nothing is deleted" in asked.output
    assert "--yes" in (await here.run("delete", "shop", "--yes", "policy", status=2)).output
    assert re.search(r"^shop +active", (await here.run("list")).stdout, re.MULTILINE)
    await here.run("archive", "shop", typed="y\n")
    await here.run("delete", "shop", typed="shop\n")
    assert "shop" not in (await here.run("list")).stdout


async def test_errors_say_what_to_do(here: Installation) -> None:
    for arguments, says in (
        (("show", "nobody"), "there is no run 'nobody'"),
        (("create", "policy", "--model", here.model), "choose another name"),
        (("create", "shop", "--model", "/nowhere"), "/nowhere"),
        (("create", "a b", "--model", here.model), "name"),
        (("create", "shop", "--model", here.model, "--set", "tokens"), "'tokens': write KEY=VALUE"),
        (("set", "policy", "lease_secs=3"), "settings.lease_secs: there is no such field"),
        (("set", "policy", "weights=adapter"), "begin a new run"),
        (("delete", "policy", "--yes", "policy"), "base-rl runs archive policy"),
    ):
        refused = await here.run(*arguments, status=1)
        assert "error: " in refused.stderr
        assert says in refused.stderr, refused.stderr
