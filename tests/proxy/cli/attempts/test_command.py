"""`base-rl attempts` with a real installation and the scripted engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proxy.cli.commands import app
from tests.clients.stack import RUN, Stack, running_stack

AGENT = """
from openai import AsyncOpenAI

async def attempt(task, session):
    if task.get("crash"):
        raise RuntimeError("out of luck")
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        question = [{"role": "user", "content": task["question"]}]
        return await client.chat.completions.create(model=session.model, messages=question)

def reward(task, completion):
    return [{"reward": 1.0}, {"turn_id": completion.id, "reward": 0.5, "name": "style"}]
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("base-rl")) as running:
        yield running


def run(stack: Stack, *arguments: str, status: int = 0) -> Any:
    """Run the command and return what it printed, as JSON if it is JSON."""
    options = ["--url", stack.url, "--api-key", stack.run_key]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["attempts", *arguments, *options])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.output


def test_groups_are_rewarded_and_what_failed_is_attempted_again(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "sum", "question": "What is 1 + 1?"}\n{"id": "bad", "crash": true}\nnonsense\n')
    arguments = [RUN, "--tasks", str(tasks), "--function", f"{tmp_path}/agent.py:attempt", "--group-size", "2"]
    arguments += ["--reward", f"{tmp_path}/agent.py:reward", "--journal", str(tmp_path / "journal"), "--json"]
    before = stack.session_ids()
    report = run(stack, *arguments, status=3)
    assert report["attempts"] == 2
    assert report["mean_reward"] == 1.0
    assert report["failed"] == 2
    assert report["problems"] == {"bad": "the attempt raised RuntimeError: out of luck"}
    assert "line 3" in report["bad_lines"][0]
    sessions = [stack.session(one).view["session"] for one in stack.session_ids() - before]
    rewarded = [session for session in sessions if session["task"] == "sum"]
    assert len({session["group_id"] for session in rewarded}) == 1
    assert [session["state"] for session in rewarded] == ["ended", "ended"]
    assert {session["outcome"] for session in sessions if session["task"] == "bad"} == {"failed"}
    assert all(session["reward"] is None for session in sessions if session["task"] == "bad")

    tasks.write_text('{"id": "sum", "question": "What is 1 + 1?"}\n{"id": "bad", "question": "mended"}\n')
    again = run(stack, *arguments)
    assert again["attempts"] == 4
    assert again["failed"] == 0
    assert len(stack.session_ids() - before) == 6


def test_programs_evaluate_without_training(stack: Stack, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "one"}\n')
    before = stack.session_ids()
    shown = run(stack, RUN, "--tasks", str(tasks), "--command", "echo 0.25", "--group-size", "1", "--eval")
    assert "reward 0.250" in shown
    (session,) = stack.session_ids() - before
    assert stack.session(session).view["session"]["purpose"] == "eval"


def test_feedback_that_the_proxy_refuses_fails_its_attempt_alone(stack: Stack, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "one"}\n')
    (tmp_path / "bad.py").write_text("""print('{"reward": 1, "colour": "red"}')""")
    program = f"{sys.executable} {tmp_path}/bad.py"
    report = run(stack, RUN, "--tasks", str(tasks), "--command", program, "--group-size", "1", "--json", status=3)
    assert "colour" in report["problems"]["one"]


def test_an_agent_that_never_works_is_told_soon(stack: Stack, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "one"}\n')
    shown = run(stack, RUN, "--tasks", str(tasks), "--command", "false", "--group-size", "64", status=1)
    assert "the first 20 attempts all failed; the last: exit status 1" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["other", "--command", "true"], "cannot use the run 'other'"),
        ([RUN], "name the agent"),
        ([RUN, "--command", "true", "--function", "json:dumps"], "name the agent"),
        ([RUN, "--command", "'unclosed"], "cannot be read"),
    ],
)
def test_mistakes_are_named(stack: Stack, tmp_path: Path, arguments: list[str], message: str) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "one"}\n')
    assert message in run(stack, *arguments, "--tasks", str(tasks), status=1)


def test_the_program_needs_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "one"}\n')
    arguments = ["attempts", "demo", "--tasks", str(tasks), "--command", f"{sys.executable} -V"]
    result = CliRunner().invoke(app, [*arguments, "--data-dir", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "there is no installation" in result.output
