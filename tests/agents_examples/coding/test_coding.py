from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from agents_examples.coding.agent import AGENTS, Command, attempt, solve
from agents_examples.coding.reward import count_passed, reward
from agents_examples.coding.tasks import REPOSITORIES, Repository
from agents_examples.coding.worktree import apply, changes, fresh_worktree, git
from benchmarks.examples.run import EXAMPLES
from proxy.settings import load_settings
from tests.docs.markdown import code_blocks
from trainer.config import load_runs

MEAN = next(one for one in REPOSITORIES if one.id == "mean")
MENDED = "def mean(values):\n    if not values:\n        raise ValueError\n    return sum(values) / len(values)\n"


def patch(**files: str) -> str:
    """Return the patch that writes these files, whose names have `_` for the dot, into the repository `mean`."""
    with fresh_worktree(MEAN.files) as worktree:
        for name, content in files.items():
            (worktree / f"{name}.py").write_text(content)
        return changes(worktree)


@pytest.mark.parametrize("repository", REPOSITORIES, ids=lambda one: one.id)
def test_some_tests_fail_at_first(repository: Repository) -> None:
    passed, total = count_passed(repository.files, "")
    assert 0 < passed < total


def test_a_mended_repository_earns_all() -> None:
    assert reward({"files": MEAN.files}, patch(stats=MENDED)) == {"reward": 1.0, "comment": "3 of 3 tests pass"}


@pytest.mark.parametrize(
    "files",
    [
        {"test_stats": ""},
        {"test_stats": "import unittest\nclass MeanTest(unittest.TestCase):\n    def test_it(self): pass\n"},
        {"test_more": "import unittest\nclass More(unittest.TestCase):\n    def test_it(self): pass\n"},
    ],
)
def test_changed_tests_do_not_count(files: dict[str, str]) -> None:
    assert count_passed(MEAN.files, patch(**files)) == count_passed(MEAN.files, "")


@pytest.mark.parametrize(
    "code", ["def mean(:", "raise SystemExit(0)", "import os\nos._exit(0)", "print(3, 3)\nexit()"]
)
def test_code_that_does_not_run_earns_nothing(code: str) -> None:
    assert count_passed(MEAN.files, patch(stats=code)) == (0, 3)


def test_an_attempt_leaves_the_repository_of_others_alone() -> None:
    with fresh_worktree(MEAN.files) as one, fresh_worktree(MEAN.files) as other:
        (one / "stats.py").write_text(MENDED)
        assert "-    return sum(values) / (len(values) - 1)" in changes(one)
        assert changes(other) == ""
        apply(other, changes(one))
        assert (other / "stats.py").read_text() == MENDED
        assert git(one, "rev-parse", "--abbrev-ref", "HEAD").strip() == "attempt"


async def test_a_coding_agent_runs_in_the_worktree_with_a_home_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    script = 'cp "$HOME/.agent/new" stats.py; test -z "$SECRET_TOKEN"'
    command = Command(words=["sh", "-c", script], variables={}, files={".agent/new": MENDED})
    with fresh_worktree(MEAN.files) as worktree:
        assert "+    return sum(values) / len(values)" in await solve(command, worktree)


async def test_a_failing_agent_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="sh: status 3: no model"):
        await solve(Command(words=["sh", "-c", "echo no model; exit 3"], variables={}, files={}), tmp_path)


async def test_a_cancelled_agent_ends_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    command = Command(
        words=["sh", "-c", f"sleep 600 & echo $! > {pids}.new; mv {pids}.new {pids}; wait"], variables={}, files={}
    )
    running = asyncio.create_task(solve(command, tmp_path))
    async with asyncio.timeout(20):
        while not pids.exists():
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(20):
        while _is_alive(int(pids.read_text())):
            await asyncio.sleep(0.02)


def _is_alive(pid: int) -> bool:
    """Return whether a process runs. One that ended and that nobody has waited for yet does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_an_unknown_agent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODING_AGENT", "other")
    session: Any = None
    with pytest.raises(ValueError, match="set it to one of claude, codex, opencode"):
        await attempt({"files": MEAN.files}, session)


@pytest.mark.parametrize("name", AGENTS)
def test_agents_are_told_the_address_the_key_and_the_model(name: str) -> None:
    command = AGENTS[name]("http://base-rl.test/v1", "rl-ses-1", "coding")
    everything = [*command.words, *command.variables.values(), *command.files.values()]
    assert any("http://base-rl.test" in text for text in everything)
    assert "rl-ses-1" in command.variables.values()
    assert any("coding" in text for text in everything)


def test_the_configurations_are_valid(tmp_path: Path) -> None:
    folder = EXAMPLES / "coding"
    (block,) = code_blocks((folder / "README.md").read_text(), "toml")
    real = tmp_path / "real.toml"
    real.write_text(block)
    for file in (folder / "config.toml", real):
        assert load_settings(file).run.name == "coding"
        assert load_runs(file, {}, {})


def test_the_tasks_are_those_that_the_example_writes(tmp_path: Path) -> None:
    importlib.import_module("agents_examples.coding.tasks").write_tasks(tmp_path / "tasks.jsonl")
    assert (EXAMPLES / "coding" / "tasks.jsonl").read_text() == (tmp_path / "tasks.jsonl").read_text()
