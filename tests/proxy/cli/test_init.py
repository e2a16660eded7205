"""`base-rl init`: the folder that it makes works as it is."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.cli.commands import app
from proxy.cli.starting_folder import examples, valid_name


def init(*arguments: str, status: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["init", *arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("example", list(examples()))
def test_every_example_stands_alone_in_its_folder(tmp_path: Path, example: str) -> None:
    folder = tmp_path / "My agent"
    assert "base-rl up --config config.toml" in init(str(folder), "--example", example, "--yes")
    run = tomllib.loads((folder / "config.toml").read_text())["run"]
    assert run["name"] == "My-agent"
    assert run["model"] == "checkpoint"
    assert (folder / "checkpoint" / "config.json").is_file()
    assert all(json.loads(line)["id"] for line in (folder / "tasks.jsonl").read_text().splitlines())
    # Without the project on its path, as in an environment of the reader's own.
    code = "import sys; sys.modules['agents_examples'] = None; import agent, reward; print(agent.attempt.__name__)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    if (folder / "requirements.txt").exists() and loaded.returncode:
        assert "pip install -r" in loaded.stderr.splitlines()[-1]
        assert "pip install -r requirements.txt" in (folder / "README.md").read_text()
    else:
        assert loaded.stdout == "attempt\n", loaded.stderr
    dry = subprocess.run(
        [sys.executable, "-m", "proxy.cli", "up", "--config", "config.toml", "--dry-run"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(dry.stdout)["run"]["name"] == "My-agent"


def test_another_model_and_name(tmp_path: Path) -> None:
    init(str(tmp_path / "a"), "--run", "shop", "--model", "Qwen/Qwen3-0.6B", "--yes")
    run = tomllib.loads((tmp_path / "a" / "config.toml").read_text())["run"]
    assert (run["name"], run["model"]) == ("shop", "Qwen/Qwen3-0.6B")
    assert not (tmp_path / "a" / "checkpoint").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--example", "poker"], "there is no example 'poker'; there are"),
        (["--run", "a b"], "is no name for a run"),
        (["--model", "./absent"], "there is no directory ./absent"),
    ],
)
def test_mistakes_leave_no_folder(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in init(str(tmp_path / "a"), *arguments, "--yes", status=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "exists already" in init(str(tmp_path), "--yes", status=1)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(("text", "name"), [("My agent!", "My-agent"), ("..", "agent"), ("x" * 80, "x" * 64)])
def test_names_are_made_of_folders(text: str, name: str) -> None:
    assert valid_name(text) == name
