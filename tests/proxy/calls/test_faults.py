"""Engines that fail and clients that disconnect: the answers, and what is recorded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.calls import generation as generation_module
from proxy.calls.capture import Capture
from proxy.contract.turn import TurnState
from proxy.errors import EngineFailed, EngineTimeout, EngineUnavailable, StoreUnavailable
from proxy.tokens.template import ChatTemplate
from proxy.turns.assembly import trainable_turns
from proxy.turns.repository import TurnRepository
from proxy.turns.service import TurnRecord
from tests.proxy.calls.world import USER, World, listening, open_world, output_ids, until
from tests.running_app import bearer

ASKED: dict[str, Any] = {"model": "policy", "messages": [USER]}


async def recorded(world: World) -> Any:
    """Return the only turn, once it is recorded."""
    await until(lambda: not world.calls.running)
    (turn,) = await world.turns()
    return turn


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_generation_and_the_turn_is_kept(world: World, stream: bool) -> None:
    world.engine.gate.clear()
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        url = f"{address}/v1/chat/completions"
        call = asyncio.create_task(client.post(url, json={**ASKED, "stream": stream}))
        await world.engine.held.wait()
        call.cancel()
        await until(lambda: bool(world.engine.aborted))
        turn = await recorded(world)
    assert world.engine.aborted[0] == turn.id
    assert (turn.state, turn.finish_reason) == ("truncated", "length")
    assert output_ids(turn) == world.answers[0][:-1]
    assert turn.spans == [[0, 0, len(world.answers[0]) - 1]]


async def test_the_sdks_time_out_is_a_client_that_leaves(world: World) -> None:
    world.engine.gate.clear()
    for timeout in (0.3, 3.0, 30.0):  # on a busy machine the first may end before the call reaches the engine
        async with world.sdk(timeout=timeout) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(**ASKED)
        if world.engine.held.is_set():
            break
    await until(lambda: bool(world.engine.aborted) and not world.calls.running)
    assert (await world.turns())[-1].state == "truncated"


async def test_a_truncated_answer_can_be_continued(world: World) -> None:
    world.engine.gate.clear()
    name = {"x-base-rl-session": "s"}
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key) | name) as client:
        url = f"{address}/v1/chat/completions"
        call = asyncio.create_task(client.post(url, json={**ASKED, "stream": True}))
        await world.engine.held.wait()
        call.cancel()
        turn = await recorded(world)
        world.engine.gate.set()
        said = {"role": "assistant", "content": turn.response["choices"][0]["text"]}
        await client.post(url, json={**ASKED, "messages": [USER, said, {"role": "user", "content": "Go on."}]})
    assert [row.continuation for row in await world.turns()] == ["new", "exact"]


async def test_an_attempt_that_was_given_up_and_sent_again_teaches_once(world: World) -> None:
    """The client's second attempt has no retry header; body and session are the same."""
    world.engine.gate.clear()
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        url, name = f"{address}/v1/chat/completions", {"x-base-rl-session": "job"}
        call = asyncio.create_task(client.post(url, json=ASKED, headers=name))
        await world.engine.held.wait()
        call.cancel()
        await recorded(world)
        world.engine.gate.set()
        assert (await client.post(url, json=ASKED, headers=name)).status_code == 200
    assert [turn.state for turn in await world.turns()] == ["truncated", "complete"]
    (session,) = await world.sessions()
    rewarded = await world.http.post("/v1/sessions/job/end", json={"outcome": "completed"})
    assert rewarded.status_code == 200
    turns = await world.store.database.read(
        lambda connection: TurnRepository(connection).turns_of({session.id: session.turn_count})
    )
    first, second = turns[session.id]
    assert first.output_ids, "it is kept"
    assert trainable_turns([first, second]) == {second.id}


async def test_an_answer_finished_after_its_client_left_is_abandoned(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has finished; the client disconnects before the turn is committed."""
    generating = generation_module.Generation._generate

    async def late(self: generation_module.Generation, capture: Capture) -> TurnState:
        state = await generating(self, capture)
        await until(lambda: self.holders == 0)
        return state

    monkeypatch.setattr(generation_module.Generation, "_generate", late)
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"{address}/v1/chat/completions", json=ASKED, timeout=httpx.Timeout(30, read=0.5))
        turn = await recorded(world)
    assert (turn.state, turn.finish_reason) == ("truncated", "stop")


async def test_an_engine_that_takes_no_notice_of_an_abort_is_cut_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_module, "ABORT_SECONDS", 0.05)
    world.engine.deaf = True
    world.engine.gate.clear()
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        call = asyncio.create_task(client.post(f"{address}/v1/chat/completions", json={**ASKED, "stream": True}))
        await world.engine.held.wait()
        call.cancel()
        turn = await recorded(world)
    assert (turn.state, output_ids(turn), turn.spans) == ("truncated", [], [])
    assert turn.response["choices"][0]["text"] == "The answer is 42."


async def test_a_client_that_leaves_while_it_waits_for_a_place_leaves_no_turn(
    tmp_path: Path, template: ChatTemplate
) -> None:
    async with open_world(tmp_path, template, concurrency=1) as world:
        world.engine.gate.clear()
        first = asyncio.create_task(world.post({}))
        await world.engine.held.wait()
        async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
            second = asyncio.create_task(client.post(f"{address}/v1/chat/completions", json=ASKED))
            await until(lambda: len(world.calls.running) == 2)
            second.cancel()
            await until(lambda: len(world.calls.running) == 1)
        world.engine.gate.set()
        assert (await first).status_code == 200
        assert len(await world.turns()) == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineUnavailable("gone"), 503, "engine_unavailable"),
        (EngineFailed("broken"), 502, "engine_failed"),
        (EngineTimeout("silent"), 504, "engine_timeout"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_early_failure_has_its_status_and_leaves_no_turn(
    world: World, error: Any, status: int, code: str, stream: bool
) -> None:
    world.engine.error = error
    response = await world.post({"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)
    assert await world.turns() == []


@pytest.mark.parametrize("headers", [{}, {"x_stainless_retry_count": "0"}])
async def test_a_first_call_that_failed_leaves_no_empty_session(world: World, headers: dict[str, str]) -> None:
    world.engine.error = EngineUnavailable("gone")
    for stream in (False, True):
        assert (await world.post({"stream": stream}, **headers)).status_code == 503
    assert (await world.post({"max_tokens": 0}, **headers)).status_code == 400
    long = [{"role": "user", "content": "much " * 1000}]
    assert (await world.post({"messages": long}, **headers)).status_code == 400
    assert await world.sessions() == []
    retried = dict.fromkeys(headers, "1")
    world.engine.error = None
    answered = await world.post({}, **retried)
    assert answered.status_code == 200
    (session,) = await world.sessions()
    assert answered.headers["x-base-rl-session"] == session.id


async def test_a_session_that_somebody_made_or_named_or_rewarded_stays(world: World) -> None:
    world.engine.error = EngineUnavailable("gone")
    _, key = await world.session_key()
    assert (await world.post({}, authorization=f"Bearer {key}")).status_code == 503
    assert (await world.post({}, x_base_rl_session="job")).status_code == 503
    assert len(await world.sessions()) == 2


async def test_a_client_that_leaves_before_the_first_token_leaves_no_session(world: World) -> None:
    world.say("")
    world.engine.gate.clear()
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        call = asyncio.create_task(client.post(f"{address}/v1/chat/completions", json=ASKED))
        await world.engine.held.wait()
        call.cancel()
        await until(lambda: not world.calls.running)
    assert (await world.turns(), await world.sessions()) == ([], [])


async def test_an_engine_that_is_down_is_503_and_serves_again_when_it_is_back(world: World) -> None:
    world.engine.down = True
    assert (await world.post({})).status_code == 503
    assert world.swaps.rechecks == 1, "the engine is asked again at once"
    world.engine.down = False
    assert (await world.post({})).status_code == 200
    assert world.swaps.rechecks == 1


async def test_an_error_in_mid_stream_is_an_event_and_the_end(world: World) -> None:
    world.engine.error, world.engine.error_after = EngineFailed("broken"), 3
    response = await world.post({"stream": True})
    assert response.status_code == 200
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "broken"
    assert "[DONE]" not in response.text
    turn = await recorded(world)
    assert (turn.state, output_ids(turn)) == ("failed", [])
    assert turn.response["choices"][0]["text"]


async def test_the_sdk_raises_an_error_in_mid_stream(world: World) -> None:
    world.engine.error, world.engine.error_after = EngineFailed("broken"), 3
    async with world.sdk() as client:
        stream = await client.chat.completions.create(**ASKED, stream=True)
        with pytest.raises(openai.APIError, match="broken"):
            _ = [chunk async for chunk in stream]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_stored_is_503(
    world: World, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def full(_record: TurnRecord) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(world.trajectories, "record", full)
    response = await world.post({"stream": stream})
    assert response.status_code == (200 if stream else 503)
    assert "the disk is full" in response.text
    assert '"finish_reason":"stop"' not in response.text


async def test_pings_keep_a_silent_stream_alive(tmp_path: Path, template: ChatTemplate) -> None:
    async with open_world(tmp_path, template, ping_seconds=0.02) as world:
        world.engine.gate.clear()
        lines: list[str] = []
        async with (
            listening(world.app) as address,
            httpx.AsyncClient(headers=bearer(world.key)) as client,
            client.stream("POST", f"{address}/v1/chat/completions", json={**ASKED, "stream": True}) as response,
        ):
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": ping") == 2:
                    world.engine.gate.set()
        assert lines.count(": ping") >= 2
        assert "data: [DONE]" in lines


async def test_the_sdk_reads_past_pings(tmp_path: Path, template: ChatTemplate) -> None:
    async with open_world(tmp_path, template, ping_seconds=0.02) as world:
        world.engine.gate.clear()
        asyncio.get_running_loop().call_later(0.1, world.engine.gate.set)
        async with world.sdk() as client:
            stream = await client.chat.completions.create(**ASKED, stream=True)
            chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The answer is 42."
