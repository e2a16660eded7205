"""`base-rl fit`: the address and key that it uses, and what it passes to the trainer. Its end is tested in
tests/trainer/fit/test_command.py."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from proxy.cli.commands import app
from proxy.cli.local_keys import LocalKeys
from proxy.cli.stack import Address

LOCAL = "http://127.0.0.1:9999"


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BASE_RL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Return a data directory whose files describe a running base-rl."""
    (tmp_path / "address.json").write_bytes(msgspec.json.encode(Address(url=LOCAL, pid=1)))
    keys = LocalKeys(admin_key="rl-admin", run_key="rl-run", trainer_key="rl-trainer")
    (tmp_path / "keys.json").write_bytes(msgspec.json.encode(keys))
    return tmp_path


def test_help_is_the_trainers(capfd: pytest.CaptureFixture[str]) -> None:
    """It is shown without a running proxy."""
    for words, said in (
        (["--help"], "base-rl fit sft --min-reward 0.9"),
        (["dpo", "--help"], "--label-smoothing"),
    ):
        assert CliRunner().invoke(app, ["fit", *words]).exit_code == 0
        assert said in capfd.readouterr().out
    assert CliRunner().invoke(app, ["fit"]).exit_code == 2
    assert "usage: base-rl fit" in capfd.readouterr().err
    assert "fit" in CliRunner().invoke(app, ["--help"]).output


def test_the_trainer_checks_options_that_only_fit_has(data_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = ["fit", "sft", "--data-dir", str(data_dir), "--epochs", "3", "--set", "seed=1"]
    assert CliRunner().invoke(app, given).exit_code == 2
    assert "say which sessions are worth imitating" in capfd.readouterr().err
    assert CliRunner().invoke(app, [*given, "--epoch", "many"]).exit_code == 2
    assert "invalid int value: 'many'" in capfd.readouterr().err


def test_a_wrong_option_of_the_trainer_and_a_missing_key_are_reported(data_dir: Path) -> None:
    given = ["fit", "sft", "--all", "--data-dir", str(data_dir)]
    for words, said in (
        (["--set", "batch.size=3"], "trainer.batch.size: no such option"),
        (["--proxy", "http://elsewhere:8080"], "no trainer key for http://elsewhere:8080"),
    ):
        result = CliRunner().invoke(app, [*given, *words])
        assert (result.exit_code, said in " ".join(result.output.split())) == (1, True), result.output
