"""The command line's own behaviour: exit statuses, and advice in its messages."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.cli.commands import app
from proxy.cli.console import finish
from proxy.settings import ConfigurationError


def ended(outcome: BaseException | int) -> int:
    def command() -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    with pytest.raises(SystemExit) as exit_:
        finish(command)
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_signals_end_a_command_with_their_status_and_no_traceback() -> None:
    assert ended(KeyboardInterrupt()) == 130
    assert ended(asyncio.CancelledError()) == 143
    assert ended(0) == 0


def test_errors_that_users_can_correct_are_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(ConfigurationError("server.port: too large")) == 1
    assert "server.port: too large" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        finish(lambda: 1 // 0)


@pytest.mark.parametrize("command", [[], ["demo"], ["up"], ["runs"], ["runs", "list"], ["status"], ["doctor"]])
def test_help_teaches(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert len(result.output) > 200


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up"], "--model"),
        (["up", "--model", "./no-such-directory"], "is not a directory"),
        (["up", "--model", ".", "--config", "missing.toml"], "cannot read missing.toml"),
        (["status"], "base-rl up"),
        (["runs", "list"], "base-rl up"),
        (["status", "--url", "http://127.0.0.1:9", "--api-key", "k"], "no base-rl answers"),
    ],
)
def test_mistakes_are_answered_with_what_to_do(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    result = subprocess.run(
        [sys.executable, "-m", "proxy.cli", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert "Traceback" not in result.stderr
