"""How `base-rl up` resolves the options of a scripted engine before anything starts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from proxy.cli.up import UpOptions, run_up
from proxy.engines.scripted.script import MODEL
from proxy.settings import ConfigurationError


async def dry(overrides: dict[str, dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Return the resolved configuration."""
    out = Console(file=io.StringIO(), width=300)
    given = {"config": None, "overrides": overrides, "trainer": None, "seed": None, "dry_run": True} | options
    assert await run_up(UpOptions(**given), out) == 0
    resolved: dict[str, Any] = json.loads(out.file.getvalue())  # type: ignore[attr-defined]
    return resolved


async def test_a_scripted_engine_needs_no_model_and_gets_a_place_of_its_own() -> None:
    resolved = await dry({"engine": {"kind": "scripted"}})
    assert resolved["run"]["model"] == str(MODEL)
    assert resolved["server"]["data_dir"] == ".base-rl/scripted"
    assert "trainer" not in resolved


async def test_a_model_for_a_script_needs_no_weights(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    resolved = await dry(
        {"engine": {"kind": "scripted"}, "run": {"model": str(tmp_path)}, "server": {"data_dir": tmp_path / "d"}}
    )
    assert resolved["run"]["model"] == str(tmp_path)
    assert resolved["server"]["data_dir"] == str(tmp_path / "d")


async def test_a_dry_run_shows_no_password() -> None:
    resolved = await dry(
        {
            "engine": {"kind": "scripted"},
            "database": {"url": "sqlite:////nowhere/store.sqlite3?password=hush"},
            "jobs": {"broker": "redis://me:hush@redis:6379/0?ssl_password=hush&timeout=3"},
            "engines": {"far": {"url": "http://me:hu@sh@far:30000/path@x"}},
        }
    )
    assert resolved["jobs"]["broker"] == "redis://me:***@redis:6379/0?ssl_password=***&timeout=3"
    assert resolved["engines"]["far"]["url"] == "http://me:***@far:30000/path@x"
    assert "hush" not in json.dumps(resolved)
    given = {"jobs": {"broker": "redis://redis/0", "broker_password": "hush"}, "engine": {"kind": "scripted"}}
    assert "hush" not in json.dumps(await dry(given))


@pytest.mark.parametrize(
    ("options", "says"), [({"trainer": True}, "--trainer: .*no weights"), ({"seed": 1}, "--seed: .*draws nothing")]
)
async def test_options_without_effect_on_a_script_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        await dry({"engine": {"kind": "scripted"}}, **options)


async def test_the_run_that_is_served_is_one_of_those_that_are_trained(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "config.toml"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    overrides: dict[str, dict[str, Any]] = {"run": {"model": str(model)}, "server": {"data_dir": tmp_path / "d"}}
    other = '[trainer.runs.other]\nproxy_url = "http://h:1"\napi_key = "k"\n'
    file.write_text(f'[run]\nname = "mine"\n{other}')
    with pytest.raises(ConfigurationError, match=r"trainer.run: 'mine' is not one of trainer.runs \(other\)"):
        await dry(overrides, config=file)
    file.write_text(f'[run]\nname = "mine"\n{other}[trainer.runs.mine]\nseed = 4\n')
    runs = (await dry(overrides, config=file))["trainer"]["runs"]
    assert [(name, run["proxy_url"], run["seed"]) for name, run in runs.items()] == [
        ("other", "http://h:1", 0),
        ("mine", "http://127.0.0.1:8080", 4),
    ]
    assert all("api_key" not in run for run in runs.values())


async def test_a_wrong_script_is_reported_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "script.toml").write_text("[[rule]]\n")
    with pytest.raises(ConfigurationError, match="rule 1: it has no answer"):
        await dry({"engine": {"kind": "scripted", "script": tmp_path / "script.toml"}})
