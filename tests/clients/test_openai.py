"""OpenAI's own SDKs."""

from __future__ import annotations

import pytest

from tests.clients.following import Followed, Follower

pytestmark = [pytest.mark.clients]


def adds_with_the_tool(followed: Followed, sessions: int = 1) -> None:
    """Check each session: the tool is called once, its result is sent, and the second turn continues the first one's
    tokens."""
    assert followed.output.count("The sum is 42.") == sessions
    assert len(followed.sessions) == sessions
    for session in followed.sessions:
        assert session.called == [("add", {"a": 17, "b": 25})]
        assert session.said == ["", "The sum is 42."]
        assert [turn["continuation"] for turn in session.turns] == ["new", "exact"]


def test_the_node_sdk(follow: Follower) -> None:
    adds_with_the_tool(follow("openai-node"))


def test_the_python_sdk_and_its_helpers(follow: Follower) -> None:
    """Besides the task: `parse`, a stream, `.stream()`, asyncio, and Responses; each of those calls is a session."""
    followed = follow("openai-python")
    task, *helped = followed.sessions
    adds_with_the_tool(Followed(output=followed.output, sessions=[task]))
    assert followed.output.count("Weather(city='Paris', degrees=21)") == 2
    assert followed.output.count("Hello from the engine.") == 5
    assert [len(session.turns) for session in helped] == [1] * 7
    said = [answer for session in helped for answer in session.said]
    assert said.count("Hello from the engine.") == 5
    assert sum("Paris" in answer for answer in said) == 2
