"""Reuse of a session's name: every attempt has a session and rewards of its own."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.feedback.service import FeedbackItem
from tests.proxy.calls.agents import Agent, user
from tests.proxy.calls.test_attribution import call
from tests.proxy.calls.world import CALL, TOOLS, USER, World

NAMED: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("/sessions/fixed-name/v1", {}, {}),
    ("/v1", {"X-Base-RL-Session": "fixed-name"}, {}),
    ("/v1", {"Session-Id": "fixed-name"}, {}),
    ("/v1", {"OpenAI-Project": "fixed-name"}, {}),
    ("/v1", {}, {"metadata": {"session_id": "fixed-name"}}),
]


@pytest.fixture
def chat_url(database_url: str) -> str:
    """The store numbers the attempts, so these tests run on both databases."""
    return database_url


async def reward(world: World, value: float) -> None:
    """Post a final reward by the name, which means the newest attempt."""
    item = FeedbackItem(entries=(("reward", value),), session_id="fixed-name")
    await world.store.feedback.record(world.store.owner, [item])


@pytest.mark.parametrize(("prefix", "headers", "body"), NAMED)
async def test_three_attempts_of_one_name_are_three_sessions(
    world: World, prefix: str, headers: dict[str, str], body: dict[str, Any]
) -> None:
    found = []
    for attempt in (1, 2, 3):
        for _ in range(2):
            response = await call(world, "chat", headers, body, prefix)
            assert response.headers["x-base-rl-attempt"] == str(attempt)
            found.append(response.headers["x-base-rl-session"])
        await reward(world, float(attempt - 1))
    assert found[::2] == found[1::2]
    sessions = await world.sessions()
    assert [(session.id, session.attempt, session.reward) for session in sessions] == [
        (found[0], 1, 0.0),
        (found[2], 2, 1.0),
        (found[4], 3, 2.0),
    ]
    assert {(session.state, session.training) for session in sessions} == {("ended", "ready")}
    view = (await world.http.get("/v1/sessions/fixed-name")).json()
    assert (view["id"], view["attempt"]) == (found[4], 3)
    assert [(one["id"], one["attempt"], one["reward"]) for one in view["attempts"]] == [
        (found[4], 3, 2.0),
        (found[2], 2, 1.0),
        (found[0], 1, 0.0),
    ]
    assert (await world.http.get(f"/v1/sessions/{found[0]}")).json()["attempt"] == 1


async def test_a_call_that_continues_the_ended_attempt_belongs_to_it(world: World) -> None:
    """A summary after the score belongs to it by its conversation, or by the id of a tool call whose text was
    changed."""
    agent = Agent(world, USER, headers={"X-Base-RL-Session": "fixed-name"}, tools=TOOLS)
    await agent.ask(answer=CALL)
    await reward(world, 1.0)
    world.say("A summary.")
    by_conversation = await agent.send([*agent.messages, user("Summarise.")])
    changed = [user("What was it again?"), agent.messages[-1], user("Summarise.")]
    by_id = await agent.send(changed)
    for response in (by_conversation, by_id):
        assert response.headers["x-base-rl-session"] == agent.sessions[0]
        assert "not trained" in response.headers["x-base-rl-warning"]
    anew = await agent.send([USER])
    assert anew.headers["x-base-rl-attempt"] == "2"
    assert "x-base-rl-warning" not in anew.headers


async def test_a_call_that_is_sent_again_after_the_end_gets_its_answer(world: World) -> None:
    headers = {"X-Base-RL-Session": "fixed-name", "Idempotency-Key": "k"}
    first = await call(world, "chat", headers, {})
    counted = {"X-Base-RL-Session": "fixed-name", "x-stainless-retry-count": "0"}
    second = await call(world, "chat", counted, {"seed": 1})
    await reward(world, 1.0)
    retried = await call(world, "chat", {**counted, "x-stainless-retry-count": "1"}, {"seed": 1})
    assert retried.json()["id"] == second.json()["id"]
    world.restart()
    again = await call(world, "chat", headers, {})
    assert again.json()["id"] == first.json()["id"]
    assert len(await world.sessions()) == 1


async def test_a_session_of_ours_has_no_second_attempt(world: World) -> None:
    session_id, key = await world.session_key()
    for headers, prefix in (({"Authorization": f"Bearer {key}"}, "/v1"), ({}, f"/sessions/{session_id}/v1")):
        await call(world, "chat", headers, {}, prefix)
        await world.http.post(f"/v1/sessions/{session_id}/end")
        late = await call(world, "chat", headers, {}, prefix)
        assert late.headers["x-base-rl-session"] == session_id
        assert "x-base-rl-attempt" not in late.headers
        assert "not trained" in late.headers["x-base-rl-warning"]


async def test_an_attempt_that_was_only_ended_is_followed_by_the_next(world: World) -> None:
    first = await call(world, "chat", {}, {}, "/sessions/fixed-name/v1")
    await world.http.post("/v1/sessions/fixed-name/end", json={"outcome": "failed"})
    second = await call(world, "chat", {}, {}, "/sessions/fixed-name/v1")
    assert second.headers["x-base-rl-session"] != first.headers["x-base-rl-session"]
    assert second.headers["x-base-rl-attempt"] == "2"
