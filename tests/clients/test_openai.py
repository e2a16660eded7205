"""OpenAI's own SDKs."""

from __future__ import annotations

import pytest

from tests.clients.following import Followed, Follower

pytestmark = [pytest.mark.clients]


def adds_with_the_tool(followed: Followed, sessions: int = 1) -> None:
    """Every session is one task: the tool is called once, its result is told, and the second turn goes on from the
    first one's tokens."""
    assert followed.output.count("The sum is 42.") == sessions
    assert len(followed.sessions) == sessions
    for session in followed.sessions:
        assert session.called == [("add", {"a": 17, "b": 25})]
        assert session.said == ["", "The sum is 42."]
        assert [turn["continuation"] for turn in session.turns] == ["new", "exact"]


@pytest.mark.parametrize("name", ["openai-python", "openai-node"])
def test_one_task_is_one_session(follow: Follower, name: str) -> None:
    adds_with_the_tool(follow(name))
