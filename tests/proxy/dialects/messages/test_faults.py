"""Faults in Anthropic's wire format: errors, clients that disconnect, repeated requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from proxy.errors import EngineFailed, EngineTimeout, EngineUnavailable
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.world import CALL, World, listening, open_world, output_ids, until
from tests.proxy.dialects.messages.anthropic_client import ASKED, PATH, TOOL, ask, read_events, sdk
from tests.running_app import bearer

NAMED = {"x-base-rl-session": "job"}


async def test_no_key_and_a_wrong_one_are_401(world: World) -> None:
    for headers in ({"authorization": ""}, {"authorization": "", "x-api-key": "wrong"}):
        response = await ask(world, headers=headers)
        assert (response.status_code, response.json()["type"]) == (401, "error")
        assert response.json()["error"]["type"] == "authentication_error"
    async with sdk(world, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(**ASKED)
    assert caught.value.type == "authentication_error"


async def test_a_session_key_on_another_session_is_403(world: World) -> None:
    _, key = await world.session_key()
    response = await ask(world, "/sessions/other/v1/messages", {"authorization": f"Bearer {key}"})
    assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


async def test_the_sdk_raises_its_own_errors(world: World) -> None:
    async with sdk(world) as client:
        with pytest.raises(anthropic.NotFoundError, match="nope"):
            await client.messages.create(**{**ASKED, "model": "nope"})
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**{**ASKED, "messages": []})
        with pytest.raises(anthropic.NotFoundError, match="there is nothing at /v1/messages/batches"):
            await client.messages.batches.list()
    assert caught.value.type == "invalid_request_error"
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (EngineUnavailable("gone"), 503, "overloaded_error"),
        (EngineFailed("broken"), 502, "api_error"),
        (EngineTimeout("silent"), 504, "timeout_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_stream_has_its_status_and_records_no_turn(
    world: World, error: Any, status: int, kind: str, stream: bool
) -> None:
    world.engine.error = error
    response = await ask(world, stream=stream)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert ("retry-after" in response.headers) == (status == 503)
    assert await world.turns() == []


async def test_an_error_in_mid_stream_is_an_event_and_the_end(world: World) -> None:
    world.engine.error, world.engine.error_after = EngineFailed("broken"), 3
    response = await ask(world, stream=True)
    assert response.status_code == 200
    *_, last, rest = response.text.split("\n\n")
    named, data = last.split("\n")
    assert (named, rest) == ("event: error", "")
    error = {"type": "api_error", "message": "broken", "param": None, "code": "engine_failed"}
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": error}
    assert "message_stop" not in response.text


async def test_the_sdk_raises_an_error_in_mid_stream(world: World) -> None:
    world.engine.error, world.engine.error_after = EngineFailed("broken"), 3
    async with sdk(world) as client:
        stream = await client.messages.create(**ASKED, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="broken") as caught:
            _ = [event async for event in stream]
    assert caught.value.type == "api_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_generation_and_the_turn_is_recorded(world: World, stream: bool) -> None:
    world.engine.gate.clear()
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        call = asyncio.create_task(client.post(address + PATH, json={**ASKED, "stream": stream}))
        await world.engine.held.wait()
        call.cancel()
        await until(lambda: bool(world.engine.aborted))
        await until(lambda: not world.calls.running)
    (turn,) = await world.turns()
    assert turn.state == "truncated"
    assert output_ids(turn) == world.answers[0][:-1]


async def test_pings_keep_a_silent_stream_alive_and_the_sdk_reads_past_them(
    tmp_path: Path, template: ChatTemplate
) -> None:
    async with open_world(tmp_path, template, ping_seconds=0.02) as world:
        world.engine.gate.clear()
        lines: list[str] = []
        async with (
            listening(world.app) as address,
            httpx.AsyncClient(headers=bearer(world.key)) as client,
            client.stream("POST", address + PATH, json={**ASKED, "stream": True}) as response,
        ):
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count("event: ping") == 2:
                    world.engine.gate.set()
        assert lines.count('data: {"type":"ping"}') >= 2
        assert lines[0] == "event: message_start"
        world.engine.gate.clear()
        asyncio.get_running_loop().call_later(0.1, world.engine.gate.set)
        async with sdk(world) as anthropics, anthropics.messages.stream(**ASKED) as stream:
            assert await stream.get_final_text() == "The answer is 42."


@pytest.mark.parametrize("again", ["x-stainless-retry-count", "idempotency-key"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_sent_again_is_answered_from_its_record(world: World, again: str, stream: bool) -> None:
    world.say(f"Sum:\n{CALL}")
    headers = [{**NAMED, again: value} for value in (("0", "1") if again.startswith("x") else ("k", "k"))]
    first, second = [await ask(world, headers=sent, stream=stream, tools=[TOOL]) for sent in headers]
    assert len(await world.turns()) == len(world.engine.requests) == 1
    for header in ("x-base-rl-turn", "x-base-rl-session"):
        assert second.headers[header] == first.headers[header]
    if not stream:
        assert second.json() == first.json()
        return
    streams = [read_events(response.text) for response in (first, second)]
    assert streams[0][0] == streams[1][0]
    assert streams[0][-2:] == streams[1][-2:]
    starts = [[event for event in events if event["type"] == "content_block_start"] for events in streams]
    assert starts[0] == starts[1]


async def test_the_sdks_retry_of_an_abandoned_call_is_a_new_attempt(world: World) -> None:
    world.engine.gate.clear()
    async with sdk(world, max_retries=1, timeout=1.0, default_headers=NAMED) as client:
        asking = asyncio.create_task(client.messages.create(**ASKED))
        await world.engine.held.wait()
        await until(lambda: len(world.engine.requests) == 2)
        world.engine.gate.set()
        assert (await asking).content
    assert sorted(turn.state for turn in await world.turns()) == ["complete", "truncated"]
