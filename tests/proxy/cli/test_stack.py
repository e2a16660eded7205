"""Errors that prevent an installation from starting, and the settings passed to its trainer."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.addresses import NoFreePort, random_free_port
from proxy.cli.engine_plan import engine_plan
from proxy.cli.stack import AlreadyRunning, read_address, running_stack, trainer_environment
from proxy.engines.launch import SGLANG_READY_MARKER
from proxy.settings import ConfigurationError, Settings, load_settings
from trainer.config import load_settings as load_trainer_settings

HOST = "127.0.0.1"


def settings(data_dir: Path, port: int, kind: str = "http://127.0.0.1:9") -> Settings:
    """Return settings with an engine elsewhere, so that only the proxy is started."""
    overrides: dict[str, dict[str, Any]] = {
        "server": {"data_dir": data_dir, "port": port},
        "engine": {"kind": kind},
        "run": {"model": str(data_dir)},
    }
    return load_settings(None, overrides)


async def started(data_dir: Path, port: int, **options: Any) -> str:
    """Start an installation, end it, and return its address."""
    options = {
        "config_file": None,
        "with_trainer": False,
        "seed": None,
        "listener": lambda part, what: None,
    } | options
    async with running_stack(settings(data_dir, port), **options) as stack:
        address = read_address(data_dir)
        assert address is not None
        assert address.url == stack.url
        return stack.url


async def test_a_data_directory_has_one_installation_at_a_time(tmp_path: Path) -> None:
    port = random_free_port(HOST)

    async def start_another() -> None:
        with pytest.raises(AlreadyRunning, match=rf":{port} \(pid \d+\) uses .*--data-dir"):
            await started(tmp_path, random_free_port(HOST))

    options: dict[str, Any] = {"config_file": None, "with_trainer": False, "seed": None}
    async with running_stack(settings(tmp_path, port), listener=lambda part, what: None, **options):
        await start_another()
    assert read_address(tmp_path) is None
    assert await started(tmp_path, port) == f"http://{HOST}:{port}"


async def test_replicas_are_parts_of_their_own(tmp_path: Path) -> None:
    chosen = load_settings(
        None,
        {
            "server": {"data_dir": tmp_path, "port": random_free_port(HOST)},
            "engine": {"kind": "scripted", "replicas": 2},
            "run": {"model": str(tmp_path)},
        },
    )
    options: dict[str, Any] = {"config_file": None, "with_trainer": False, "seed": None}
    async with running_stack(chosen, listener=lambda part, what: None, **options) as stack:
        assert stack.supervisor.parts == ("engine", "engine-2", "proxy")
        assert len({stack.supervisor.log(part) for part in stack.supervisor.parts}) == 3


async def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(NoFreePort, match="--port"):
            await started(tmp_path, taken)
        assert not (tmp_path / "logs").exists()
        assert await started(tmp_path, taken, or_next_port=True) != f"http://{HOST}:{taken}"


async def test_a_data_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--data-dir"):
        await started(tmp_path / "file", random_free_port(HOST))


@pytest.mark.parametrize("content", [b"", b"{", b"[]"])
def test_a_damaged_address_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "address.json").write_bytes(content)
    assert read_address(tmp_path) is None


def test_a_seed_is_passed_to_the_trainer_only_if_one_was_given(tmp_path: Path) -> None:
    told = trainer_environment(settings(tmp_path, 1), url="http://h", seed=None)
    assert "BASE_RL_TRAINER__SEED" not in told
    assert trainer_environment(settings(tmp_path, 1), url="http://h", seed=3) == {
        **told,
        "BASE_RL_TRAINER__SEED": "3",
    }


def test_the_trainer_writes_into_the_data_directory(tmp_path: Path) -> None:
    told = trainer_environment(settings(tmp_path, 1), url="http://h", seed=None)
    trainer = load_trainer_settings(environment=told)
    for directory in (trainer.weights.directory, trainer.metrics.directory, trainer.profile.directory):
        assert directory.parent == tmp_path.resolve()


async def test_scripted_sessions_and_those_of_a_model_do_not_mix(tmp_path: Path) -> None:
    async def started_with(kind: str, data_dir: Path) -> None:
        chosen = settings(data_dir, random_free_port(HOST), kind)
        options: dict[str, Any] = {"config_file": None, "with_trainer": False, "seed": None}
        async with running_stack(chosen, listener=lambda part, what: None, **options):
            pass

    of_a_script, of_a_model = tmp_path / "script", tmp_path / "model"
    await started_with("scripted", of_a_script)
    await started_with("scripted", of_a_script)
    with pytest.raises(ConfigurationError, match=r"sessions of a scripted engine.*--data-dir"):
        await started_with("http://127.0.0.1:9", of_a_script)
    of_a_model.mkdir()
    (of_a_model / "base-rl.sqlite3").touch()
    with pytest.raises(ConfigurationError, match=r"sessions of a model.*--data-dir"):
        await started_with("scripted", of_a_model)


@pytest.mark.parametrize("weights", ["full", "adapter"])
def test_engines_get_the_bounds_for_adapters_where_a_run_has_adapters(weights: str, tmp_path: Path) -> None:
    (tmp_path / SGLANG_READY_MARKER).touch()
    engine = {"sglang_venv": tmp_path, "device": "cpu", "max_loras": 5, "max_lora_rank": 24}
    for kind, is_bounded in (("embedded", True), ("sglang", weights == "adapter")):
        overrides: dict[str, dict[str, Any]] = {
            "engine": {**engine, "kind": kind},
            "run": {"model": "m"},
            "runs": {"other": {"model": "m", "weights": weights}},
        }
        plan = engine_plan(load_settings(None, overrides), port=1, seed=None)
        text = " ".join(plan.argv).replace("=", " ")
        assert ("--max-loaded-loras 5" in text) == is_bounded
        assert ("--max-lora-rank 24" in text) == is_bounded
