"""The example `coding`: headless coding agents correct repositories, with the scripted engine in place of a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agents_examples.coding.agent import AGENTS
from benchmarks.examples.run import EXAMPLES
from tests.clients.environments import environment_of
from tests.clients.following import check_recorded
from tests.clients.pages import read_page
from tests.clients.stack import Recorded, running_stack

pytestmark = [pytest.mark.clients]

FOLDER = EXAMPLES / "coding"
PAGES = {"claude": "claude-code", "codex": "codex", "opencode": "opencode"}
_SECONDS = 400


# The agents' own pages are followed for each of them in the short form as well.
@pytest.mark.parametrize(
    "agent", [pytest.param(each, marks=[] if each == "opencode" else pytest.mark.exhaustive) for each in AGENTS]
)
def test_each_attempt_is_one_session_with_the_tests_as_its_reward(tmp_path: Path, agent: str) -> None:
    journal = tmp_path / "journal.jsonl"
    with running_stack(tmp_path, run="coding", script=FOLDER / "scripts" / f"{agent}.toml") as stack:
        make_attempts(agent, tmp_path, journal)
        sessions = [stack.session(session_id) for session_id in stack.session_ids()]
    finished = {each["session_id"]: each for each in map(json.loads, journal.read_text().splitlines()[1:])}
    # 1 test of 2 passes in the repository whose bug the script does not know
    assert {each["task"]: each["reward"] for each in finished.values()} == {"mean": 1.0, "slug": 0.5, "clamp": 1.0}
    assert {session.id for session in sessions} == finished.keys()
    for session in sessions:
        check_recorded(session)
        check_tree(session, agent)
        assert session.view["session"]["reward"] == finished[session.id]["reward"]


def make_attempts(agent: str, data_dir: Path, journal: Path) -> None:
    """Let an agent attempt every repository once, two at a time, as the README says."""
    command = [sys.executable, "-m", "proxy.cli", "attempts", "coding", "--tasks", str(FOLDER / "tasks.jsonl")]
    command += [
        "--function",
        "agents_examples.coding.agent:attempt",
        "--reward",
        "agents_examples.coding.reward:reward",
    ]
    command += ["--group-size", "1", "--concurrency", "2", "--journal", str(journal), "--data-dir", str(data_dir)]
    environment = environment_of(read_page(PAGES[agent])).variables(data_dir)
    ran = subprocess.run(
        command,
        env={**environment, "CODING_AGENT": agent},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def check_tree(session: Recorded, agent: str) -> None:
    """Check that the task's two calls continue each other, and that OpenCode's call for a title is a branch beside
    them."""
    (called,) = [turn for turn in session.turns if turn["answer"].get("tool_calls")]
    (answered,) = [turn for turn in session.turns if turn["parent_id"] == called["id"]]
    assert answered["continuation"] == "exact"
    assert answered["answer"]["content"].startswith("The tests say: ")
    beside = [turn for turn in session.turns if turn["id"] not in (called["id"], answered["id"])]
    assert len(beside) == (1 if agent == "opencode" else 0)
    assert all(turn["id"] != answered["parent_id"] for turn in beside)
    assert {turn["attributed_by"] for turn in session.turns} == {"key"}
