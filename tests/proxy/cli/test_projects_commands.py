"""`base-rl projects …`, `limits …` and `keys change` with a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from proxy.app import create_app
from proxy.cli.commands import app as command_line
from proxy.settings import BootstrapSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.calls.world import listening
from tests.proxy.tokens.models import write_model
from tests.running_app import running

Command = Callable[..., Awaitable[str]]


@pytest.fixture
async def base_rl(tmp_path: Path) -> AsyncIterator[Command]:
    """Run a command against an installation with the run `mine`, and return its output."""
    model = str(write_model(tmp_path / "model"))
    app = create_app(
        Settings(
            server=ServerSettings(data_dir=tmp_path / "data"),
            bootstrap=BootstrapSettings(admin_key=SecretStr("rl-admin-chosen")),
            run=RunSettings(name="mine", model=model),
        ),
        engine=FakeEngine(lambda _request: [5, 2], model_path=model, label="default"),
    )
    async with running(app), listening(app) as address:

        async def run(*arguments: str, status: int = 0, typed: str | None = None) -> str:
            runner = CliRunner(env={"COLUMNS": "300"})
            command = [*arguments, "--url", address, "--api-key", "rl-admin-chosen"]
            result = await asyncio.to_thread(runner.invoke, command_line, command, input=typed)
            assert result.exit_code == status, result.output
            return result.output

        yield run


async def test_a_project_from_its_creation_to_its_deletion(base_rl: Command) -> None:
    assert "shop is a new project" in await base_rl("projects", "create", "shop")
    assert "already: choose another name" in await base_rl("projects", "create", "shop", status=1)
    assert await base_rl("projects", "move", "mine", "shop") == "mine is in shop\n"
    listed = json.loads(await base_rl("projects", "list", "--json"))
    assert {one["name"]: one["runs"] for one in listed} == {"default": 0, "shop": 1}
    assert "archive them first" in await base_rl("projects", "archive", "shop", status=1)
    assert "has 1 runs" in await base_rl("projects", "delete", "shop", "--yes", status=1)
    await base_rl("projects", "move", "mine", "default")
    assert await base_rl("projects", "archive", "shop") == "shop is archived\n"
    assert await base_rl("projects", "unarchive", "shop") == "shop is active\n"
    assert "nothing was deleted" in await base_rl("projects", "delete", "shop", status=2, typed="shopp\n")
    assert "shop is deleted" in await base_rl("projects", "delete", "shop", typed="shop\n")
    assert "shop" not in await base_rl("projects", "list")


async def test_limits_are_set_one_by_one_listed_and_removed(base_rl: Command) -> None:
    assert "no limits are set" in await base_rl("limits", "list")
    made = await base_rl(
        "keys", "create", "--kind", "run", "--run", "mine", "--limit", "calls_per_minute=60", "--json"
    )
    key = json.loads(made)
    assert key["limits"]["calls_per_minute"] == 60
    await base_rl("limits", "set", "--key", key["id"], "tokens_per_day=1_000")
    await base_rl("limits", "set", "--project", "default", "tokens_per_day=5000", "tokens_per_month=90000")
    await base_rl("limits", "set", "--run", "mine", "tokens_per_minute=600")
    shown = {one["scope"]: one["limits"] for one in json.loads(await base_rl("limits", "list", "--json"))}
    assert shown == {
        "key": {"calls_per_minute": 60, "burst_seconds": 10.0, "tokens_per_day": 1000},
        "project": {"tokens_per_day": 5000, "burst_seconds": 10.0, "tokens_per_month": 90000},
        "run": {"tokens_per_minute": 600, "burst_seconds": 10.0},
    }
    assert "0 of 5,000" in await base_rl("projects", "list")
    await base_rl("limits", "set", "--run", "mine", "tokens_per_minute=none")
    await base_rl("limits", "set", "--key", key["id"], "tokens_per_day=none", "calls_per_minute=none")
    await base_rl("limits", "set", "--project", "default", "tokens_per_day=none", "tokens_per_month=none")
    assert "no limits are set" in await base_rl("limits", "list")
    for wrong in (["calls=1"], ["calls_per_minute=many"], ["calls_per_minute"]):
        await base_rl("limits", "set", "--run", "mine", *wrong, status=2)
    await base_rl("limits", "set", "calls_per_minute=1", status=2)


async def test_a_key_is_named_and_given_an_end(base_rl: Command) -> None:
    key = json.loads(await base_rl("keys", "create", "--kind", "viewer", "--project", "default", "--json"))
    assert "project default" in await base_rl("keys", "list")
    assert "ada, expires in 30 d" in await base_rl("keys", "change", key["id"], "--label", "ada", "--expires", "30d")
    assert "ada, valid" in await base_rl("keys", "change", key["id"], "--expires", "never")
    await base_rl("keys", "change", key["id"], status=2)
