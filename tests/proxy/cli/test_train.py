"""`base-rl train`: the address and key that it uses, and the real processes that it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from proxy.cli.commands import app
from proxy.cli.local_keys import LocalKeys
from proxy.cli.stack import Address
from proxy.cli.trainer_process import trainer_command
from tests.fakes.training_proxy import KEY, RUN, TrainingProxy
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import save_tiny_model

LOCAL = "http://127.0.0.1:9999"


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BASE_RL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory)
    return directory


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Return a data directory whose files describe a running base-rl."""
    directory = tmp_path / "data"
    directory.mkdir()
    is_up_at(directory, LOCAL)
    keys = LocalKeys(admin_key="rl-admin", run_key="rl-run", trainer_key=KEY)
    (directory / "keys.json").write_bytes(msgspec.json.encode(keys))
    return directory


def is_up_at(data_dir: Path, url: str, run: str | None = None) -> None:
    (data_dir / "address.json").write_bytes(msgspec.json.encode(Address(url=url, pid=1, run=run)))


def dry(data_dir: Path, *options: str) -> dict[str, Any]:
    """Return the resolved configuration."""
    result = CliRunner().invoke(app, ["train", "--dry-run", "--data-dir", str(data_dir), *options])
    assert result.exit_code == 0, result.output
    resolved: dict[str, Any] = json.loads(result.stdout)
    return resolved


def refused(*options: str) -> str:
    result = CliRunner().invoke(app, ["train", "--dry-run", *options])
    assert result.exit_code == 1
    return " ".join(result.output.split())


def test_address_and_directories_are_those_of_the_data_directory(data_dir: Path) -> None:
    resolved = dry(data_dir)
    assert (resolved["proxy_url"], resolved["nproc"], resolved["run"]) == (LOCAL, 1, "policy")
    assert resolved["weights"]["directory"] == str(data_dir / "weights")
    assert resolved["profile"]["directory"] == str(data_dir / "profiles")
    assert "api_key" not in resolved


def test_the_run_is_the_one_that_is_served_unless_somebody_names_another(data_dir: Path, tmp_path: Path) -> None:
    is_up_at(data_dir, LOCAL, run="my-agent")
    assert dry(data_dir)["run"] == "my-agent"
    assert dry(data_dir, "--run", "other")["run"] == "other"
    file = tmp_path / "run.toml"
    file.write_text('[run]\nname = "of-the-file"\n')
    assert dry(data_dir, "--config", str(file))["run"] == "of-the-file"


def test_options_go_before_the_file_and_the_file_before_the_data_directory(data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[run]\nname = "r"\n[trainer]\nproxy_url = "http://h:1"\napi_key = "k"\nnproc = 2\nseed = 1\n')
    given = ("--config", str(file))
    resolved = dry(data_dir, *given)
    assert [resolved[key] for key in ("proxy_url", "run", "nproc", "seed")] == ["http://h:1", "r", 2, 1]
    assert resolved["profile"]["steps"] == 0
    more = ("--proxy", "http://h:2", "--run", "s", "--nproc", "3", "--set", "seed=4", "--profile")
    resolved = dry(data_dir, *given, *more)
    assert resolved["profile"]["steps"] == 3
    assert [resolved[key] for key in ("proxy_url", "run", "nproc", "seed")] == ["http://h:2", "s", 3, 4]


def test_several_runs_are_resolved_each(data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    elsewhere = '[trainer.runs.b]\nproxy_url = "http://h:1"\n'
    file.write_text(f"[trainer]\nnproc = 2\n[trainer.runs.a]\nseed = 1\n{elsewhere}")
    given = ("--config", str(file))
    assert "trainer.runs.b.api_key: must be given" in refused("--data-dir", str(data_dir), *given)
    resolved = dry(data_dir, *given, "--set", "runs.b.api_key=k")
    assert resolved["nproc"] == 2
    assert {name: run["proxy_url"] for name, run in resolved["runs"].items()} == {"a": LOCAL, "b": "http://h:1"}
    assert all("api_key" not in run for run in resolved["runs"].values())
    assert list(dry(data_dir, "--run", "c", "--run", "d")["runs"]) == ["c", "d"]
    assert dry(data_dir, *given, "--run", "a")["run"] == "a"


def test_a_layout_brings_its_processes_and_its_backend_and_refuses_others(data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[trainer]\nlayout = "c2"\n')
    configured = ("--config", str(file))
    for options, wanted in (
        (("--layout", "d2t2"), ("d2t2", 4)),
        (("--layout", "d2t2", "--nproc", "4"), ("d2t2", 4)),
        (configured, ("c2", 2)),
        ((*configured, "--layout", "d3"), ("d3", 3)),
    ):
        resolved = dry(data_dir, *options)
        assert (resolved["layout"], resolved["nproc"], resolved["backend"]) == (*wanted, "archon")
    said = refused("--data-dir", str(data_dir), "--layout", "d2t2", "--nproc", "2")
    assert "d2t2 is for 4 processes, and nproc is 2; leave nproc out, or write t2" in said
    said = refused("--data-dir", str(data_dir), "--layout", "d2", "--set", "backend=fsdp")
    assert "leave one of them out" in said


def test_the_key_of_the_data_directory_goes_to_its_own_proxy_alone(data_dir: Path) -> None:
    said = refused("--data-dir", str(data_dir), "--proxy", "http://elsewhere:8080")
    assert "no trainer key for http://elsewhere:8080: set BASE_RL_TRAINER__API_KEY" in said
    assert f"is at {LOCAL}" in said


def test_a_wrong_option_is_reported_before_the_trainer_starts(data_dir: Path) -> None:
    assert "trainer.batch.size: no such option" in refused("--data-dir", str(data_dir), "--set", "batch.size=3")


def test_several_processes_are_started_by_the_launcher() -> None:
    assert trainer_command(1, ["--profile"]) == (sys.executable, "-m", "trainer", "--profile")
    assert trainer_command(3, ["--profile"]) == (sys.executable, "-m", "trainer.launch", "3", "--profile")


# Real processes


@contextmanager
def training(data_dir: Path, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    values = {
        "threads": "1",
        "device": "cpu",
        "batch.trajectories": "8",
        "batch.at_least": "1",
        "batch.wait_seconds": "20",
        "optimizer.learning_rate": "1e-3",
    }
    command = [sys.executable, "-m", "proxy.cli", "train", "--run", RUN, "--data-dir", str(data_dir), *options]
    for key, value in values.items():
        command += ["--set", f"{key}={value}"]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("number", "options"), [(signal.SIGINT, ("--nproc", "2")), (signal.SIGTERM, ())])
def test_it_trains_until_a_signal_and_releases_its_claim(
    tiny_model: Path, data_dir: Path, tmp_path: Path, number: signal.Signals, options: Sequence[str]
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    proxy.offer([random_groups()(version) for version in range(2)])
    log = tmp_path / "log"
    with proxy.serve() as url:
        is_up_at(data_dir, url)
        with training(data_dir, log, *options) as process:
            proxy.wait_for(lambda: len(proxy.commits) == 1 or process.poll() is not None, 240)
            assert proxy.commits, log.read_text()

            signals = [number]

            def never() -> None:
                # Once: the commit is tried again on a thread of its own, and a second signal means at once.
                while signals:
                    process.send_signal(signals.pop())
                raise ConnectionAbortedError

            proxy.before_commit = never  # it holds its claim, and tries again
            proxy.offer([random_groups()(version) for version in range(2)])
            assert process.wait(60) == 0, log.read_text()
    assert proxy.leases == {}
    assert len(list((data_dir / "weights").glob("*/v*"))) >= 1
    assert "Traceback" not in log.read_text()


@pytest.mark.timeout(300)
def test_a_trainer_that_cannot_continue_reports_why(tiny_model: Path, data_dir: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    log = tmp_path / "log"
    with proxy.serve() as url:
        is_up_at(data_dir, url)
        with training(data_dir, log, "--set", "api_key=rl-other") as process:
            assert process.wait(240) == 1
    assert "trainer.api_key is not a key of this proxy" in log.read_text()
