"""The ten rules over HTTP, in every dialect: which session a call gets, and how pages show the rule."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from proxy.sessions.identification import AttributedBy
from tests.proxy.calls.world import USER, World

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CLAUDE_CODE = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe"})

DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {"messages": [USER]}),
    "messages": ("/messages", {"messages": [USER], "max_tokens": 50}),
    "responses": ("/responses", {"input": USER["content"]}),
}

NAMED: list[tuple[AttributedBy, dict[str, str], dict[str, Any]]] = [
    (AttributedBy.HEADER, {"X-Base-RL-Session": "mine"}, {}),
    (AttributedBy.AGENT_HEADER, {"Session-Id": "019ee74f"}, {}),
    (AttributedBy.AGENT_HEADER, {"x-session-affinity": "ses_7f3aKqTzB2"}, {}),
    (AttributedBy.AGENT_HEADER, {"X-Claude-Code-Session-Id": "54c1eb09"}, {}),
    (AttributedBy.PROMPT_CACHE_KEY, {}, {"prompt_cache_key": "task-7"}),
    (AttributedBy.METADATA, {}, {"metadata": {"session_id": "task-7"}}),
    (AttributedBy.METADATA, {}, {"metadata": {"user_id": CLAUDE_CODE}}),
    (AttributedBy.PROJECT, {"OpenAI-Project": "proj_7"}, {}),
    (AttributedBy.TRACEPARENT, {"traceparent": TRACE}, {}),
]


@pytest.fixture
def chat_url(database_url: str) -> str:
    """These calls depend much on the store, so they run on both databases."""
    return database_url


async def call(
    world: World, dialect: str, headers: dict[str, str], body: dict[str, Any], prefix: str = "/v1"
) -> httpx.Response:
    path, asked = DIALECTS[dialect]
    return await world.http.post(prefix + path, json={"model": "policy", **asked, **body}, headers=headers)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("by", "headers", "body"), NAMED)
async def test_a_name_gathers_calls_and_is_shown(
    world: World, dialect: str, by: AttributedBy, headers: dict[str, str], body: dict[str, Any]
) -> None:
    for _ in range(2):
        response = await call(world, dialect, headers, body)
        assert response.status_code == 200, response.text
    (session,) = await world.sessions()
    assert response.headers["x-base-rl-session"] == session.id
    assert (session.attributed_by, session.turn_count) == (by, 2)
    assert [turn.attributed_by for turn in await world.turns()] == [by, by]
    view = (await world.http.get(f"/v1/sessions/{session.id}")).json()
    assert (view["attributed_by"], [turn["attributed_by"] for turn in view["turns"]]) == (by, [by, by])


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_path_and_key_come_first(world: World, dialect: str) -> None:
    everything = {"X-Base-RL-Session": "other", "Session-Id": "another"}
    by_path = await call(world, dialect, everything, {"user": "u"}, prefix="/sessions/mine/v1")
    session_id, key = await world.session_key()
    by_key = await call(world, dialect, {**everything, "Authorization": f"Bearer {key}"}, {"user": "u"})
    assert by_key.headers["x-base-rl-session"] == session_id
    mine = (await world.http.get("/v1/sessions/mine")).json()
    assert by_path.headers["x-base-rl-session"] == mine["id"]
    assert [turn.attributed_by for turn in await world.turns()] == ["path", "key"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_dialects_share_names(world: World, dialect: str) -> None:
    named = await call(world, "chat", {"X-Base-RL-Session": "mine"}, {})
    other = await call(world, dialect, {"thread-id": "mine"}, {})
    assert other.headers["x-base-rl-session"] == named.headers["x-base-rl-session"]


@pytest.mark.parametrize(
    ("headers", "prefix", "param"),
    [
        ({"X-Base-RL-Session": ""}, "/v1", "X-Base-RL-Session"),
        ({"X-Base-RL-Session": "x" * 201}, "/v1", "X-Base-RL-Session"),
        ({"X-Base-RL-Group": "a\tb"}, "/v1", "X-Base-RL-Group"),
        ({}, f"/sessions/{'x' * 201}/v1", "session_id"),
        ({}, "/sessions/a%0Ab/v1", "session_id"),
    ],
)
async def test_a_wrong_name_of_our_own_is_400(world: World, headers: dict[str, str], prefix: str, param: str) -> None:
    response = await call(world, "chat", headers, {}, prefix)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert await world.sessions() == []


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_invalid_name_in_a_foreign_field_is_ignored(world: World, dialect: str) -> None:
    headers = {"Session-Id": "x" * 300, "traceparent": "00-garbage", "OpenAI-Project": "  "}
    response = await call(world, dialect, headers, {"metadata": {"session_id": "a\nb", "user_id": "alice"}})
    assert response.status_code == 200, response.text
    assert [turn.attributed_by for turn in await world.turns()] == ["new"]


async def test_the_group_of_the_metadata_is_joined(world: World) -> None:
    for name in ("a", "b"):
        await call(world, "chat", {"X-Base-RL-Session": name}, {"metadata": {"group": "task-1"}})
    groups = {session.group_id for session in await world.sessions()}
    assert len(groups) == 1
    assert None not in groups


async def test_the_openai_sdk_names_a_session_by_its_project(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_PROJECT_ID", "attempt-17")
    async with world.sdk() as client:
        for _ in range(2):
            await client.chat.completions.create(model="policy", messages=[USER])
    (session,) = await world.sessions()
    assert (session.external_id, session.attributed_by, session.turn_count) == ("attempt-17", "project", 2)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("body", [{"user": "alice"}, {"metadata": {"user_id": "alice"}}])
async def test_a_user_makes_many_attempts(world: World, dialect: str, body: dict[str, Any]) -> None:
    found = [(await call(world, dialect, {}, body)).headers["x-base-rl-session"] for _ in range(2)]
    assert len(set(found)) == 2
    assert (await world.http.get("/v1/sessions/alice")).status_code == 404


async def test_without_any_name_the_conversation_decides_across_dialects(world: World) -> None:
    first = await call(world, "chat", {}, {})
    follow = [USER, first.json()["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    second = await call(world, "messages", {}, {"messages": [{k: m[k] for k in ("role", "content")} for m in follow]})
    assert second.headers["x-base-rl-session"] == first.headers["x-base-rl-session"]
    turns = await world.turns()
    assert [turn.attributed_by for turn in turns] == ["new", "conversation"]
    assert (turns[1].parent_id, turns[1].continuation) == (turns[0].id, "exact")
