"""`base-rl eval` with a real installation and the scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proxy.cli.commands import app
from tests.clients.stack import RUN, Stack, running_stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("base-rl")) as running:
        yield running


def test_results_are_kept_at_the_proxy_and_never_attempted_twice(stack: Stack, tmp_path: Path) -> None:
    tasks, made = tmp_path / "tasks.jsonl", tmp_path / "made"
    tasks.write_text('{"id": "one"}\n{"id": "two"}\n')
    agent = tmp_path / "agent.sh"
    agent.write_text(f'echo "$BASE_RL_MODEL" >> {made}; echo 0.25\n')

    def run() -> Any:
        arguments = ["eval", RUN, "--tasks", str(tasks), "--command", f"sh {agent}", "--suite", "held-out", "--json"]
        options = [
            "--url",
            stack.url,
            "--api-key",
            str(stack.admin.headers["authorization"]).removeprefix("Bearer "),
            "--run-key",
            stack.run_key,
        ]
        result = CliRunner().invoke(app, [*arguments, *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    before = stack.session_ids()
    found = run()
    assert found == {
        "suite": "held-out",
        "version": 0,
        "against": 0,
        "tasks": 2,
        "mean": 0.25,
        "mean_before": 0.25,
        "better": 0,
        "worse": 0,
    }
    sessions = [stack.session(one).view["session"] for one in stack.session_ids() - before]
    assert {session["purpose"] for session in sessions} == {"eval"}
    tasks.write_text('{"id": "one"}\n{"id": "two"}\n{"id": "three"}\n')
    assert run()["tasks"] == 3
    assert made.read_text().split() == [f"{RUN}@0"] * 3
