"""Coding agents on the command line list a folder with a tool of their own."""

from __future__ import annotations

import pytest

from tests.clients.following import Follower

pytestmark = [pytest.mark.clients]


def test_codex(follow: Follower) -> None:
    followed = follow("codex")
    assert "There is hello.txt." in followed.output
    session = followed.session
    assert [name for name, _ in session.called] == ["exec_command"]
    assert session.said[-1] == "There is hello.txt."
    assert [turn["continuation"] for turn in session.turns] == ["new", "exact"]
    assert [turn["attributed_by"] for turn in session.turns] == ["agent_header"] * 2


def test_opencode(follow: Follower) -> None:
    """The title's call is a branch of the session; the task's two turns continue each other."""
    followed = follow("opencode")
    assert "There is hello.txt." in followed.output
    session = followed.session
    assert {turn["attributed_by"] for turn in session.turns} == {"agent_header"}
    called = [turn for turn in session.turns if any(made["function"]["name"] == "bash" for made in calls(turn))]
    (answered,) = [turn for turn in session.turns if turn["answer"]["content"] == "There is hello.txt."]
    parents = {turn["id"]: turn for turn in called}
    assert answered["parent_id"] in parents
    assert answered["continuation"] == "exact"
    titles = [turn for turn in session.turns if not turn["request"].get("tools")]
    assert len(titles) == 1
    assert len(session.turns) == 3


def calls(turn: dict[str, object]) -> list[dict[str, dict[str, object]]]:
    answer = turn["answer"]
    assert isinstance(answer, dict)
    found: list[dict[str, dict[str, object]]] = answer.get("tool_calls", [])
    return found
