"""Frameworks and SDKs for Python solve the task of their page: adding two numbers with a tool."""

from __future__ import annotations

import pytest

from tests.clients.following import Follower
from tests.clients.test_openai import adds_with_the_tool

pytestmark = [pytest.mark.clients]


@pytest.mark.parametrize("name", ["langgraph", "litellm", "anthropic-python"])
def test_one_task_is_one_session(follow: Follower, name: str) -> None:
    adds_with_the_tool(follow(name))


@pytest.mark.parametrize("name", ["openai-agents", "pydantic-ai"])
def test_both_dialects_of_openai(follow: Follower, name: str) -> None:
    adds_with_the_tool(follow(name), sessions=2)


def test_smolagents(follow: Follower) -> None:
    """Its final answer is a call too. It sends calls back as rewritten texts, so the second turn is a branch."""
    followed = follow("smolagents")
    assert followed.session.called == [("add", {"a": 17, "b": 25}), ("final_answer", {"answer": "The sum is 42."})]
    assert [turn["continuation"] for turn in followed.session.turns] == ["new", "edited"]
    assert {turn["attributed_by"] for turn in followed.session.turns} == {"header"}
    assert "The sum is 42." in followed.output
