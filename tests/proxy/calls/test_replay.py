"""A repeated request gets the same answer and makes no second turn."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import partial
from typing import Any

import httpx
import pytest

from proxy.auth.service import PrincipalKind
from proxy.calls import generation, service
from proxy.calls.replay import ReplayIndex
from proxy.errors import EngineFailed
from tests.proxy.calls.world import CALL, TOOLS, USER, World, listening, until
from tests.running_app import bearer

NAMED = {"x_base_rl_session": "job"}
RETRY = {"x_stainless_retry_count": "1"}
FIRST = {"x_stainless_retry_count": "0"}


@pytest.fixture
def chat_url(database_url: str) -> str:
    """These calls depend much on the store, so they run on both databases."""
    return database_url


async def test_a_finished_call_is_answered_again_from_its_record(world: World) -> None:
    first = await world.post({}, **NAMED, **FIRST)
    again = await world.post({}, **NAMED, **RETRY)
    assert again.json() == first.json()
    for header in ("x-base-rl-turn", "x-base-rl-session"):
        assert again.headers[header] == first.headers[header]
    assert len(await world.turns()) == len(world.engine.requests) == 1


async def test_a_running_call_is_waited_for(world: World) -> None:
    world.engine.gate.clear()
    first = asyncio.create_task(world.post({}, **NAMED, **FIRST))
    await world.engine.held.wait()
    again = asyncio.create_task(world.post({}, **NAMED, **RETRY))
    (generation,) = world.calls.running
    await until(lambda: generation.holders == 2)
    world.engine.gate.set()
    assert (await again).json() == (await first).json()
    assert len(await world.turns()) == 1


async def test_a_stream_sent_again_is_streamed_again(world: World) -> None:
    world.say(f"Sum:\n{CALL}")
    asked = {"stream": True, "tools": TOOLS, "stream_options": {"include_usage": True}}
    first = await world.post(asked, **NAMED, **FIRST)
    again = await world.post(asked, **NAMED, **RETRY)
    assert again.headers["content-type"] == first.headers["content-type"]
    assert first.text.split("\n\n")[-5:] == again.text.split("\n\n")[-5:], "call, finish, usage and end are the same"
    assert "Sum:" in again.text
    assert len(await world.turns()) == 1


async def test_a_stream_sent_again_while_it_runs_comes_whole_when_it_is_done(world: World) -> None:
    world.engine.gate.clear()
    first = asyncio.create_task(world.post({"stream": True}, **NAMED, **FIRST))
    await world.engine.held.wait()
    again = asyncio.create_task(world.post({"stream": True}, **NAMED, **RETRY))
    (generation,) = world.calls.running
    await until(lambda: generation.holders == 2)
    world.engine.gate.set()
    await first
    assert "The answer is 42." in (await again).text
    assert (await again).text.endswith("data: [DONE]\n\n")
    assert len(await world.turns()) == 1


async def test_a_first_client_that_leaves_does_not_take_the_retry_along(world: World) -> None:
    world.engine.gate.clear()
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        headers = {"x-base-rl-session": "job", "x-stainless-retry-count": "0"}
        url, body = f"{address}/v1/chat/completions", {"model": "policy", "messages": [USER]}
        first = asyncio.create_task(client.post(url, json=body, headers=headers))
        await world.engine.held.wait()
        again = asyncio.create_task(client.post(url, json=body, headers={**headers, "x-stainless-retry-count": "1"}))
        (generation,) = world.calls.running
        await until(lambda: generation.holders == 2)
        first.cancel()
        await until(lambda: generation.holders == 1)
        world.engine.gate.set()
        assert (await again).json()["choices"][0]["finish_reason"] == "stop"
    assert world.engine.aborted == []
    assert [turn.state for turn in await world.turns()] == ["complete"]


@pytest.mark.parametrize("headers", [{}, FIRST])
async def test_an_equal_call_that_is_not_a_retry_is_a_turn_of_its_own(world: World, headers: dict[str, str]) -> None:
    for _ in range(2):
        await world.post({}, **NAMED, **headers)
    assert len(await world.turns()) == 2


async def test_a_retry_of_what_was_never_seen_or_differs_is_a_turn_of_its_own(world: World) -> None:
    await world.post({}, **NAMED, **RETRY)
    await world.post({"seed": 1}, **NAMED, **RETRY)
    await world.post({}, x_base_rl_session="other job", **RETRY)
    assert len(await world.turns()) == 3


async def test_a_retry_of_a_failed_call_is_a_new_attempt(world: World) -> None:
    world.engine.error = EngineFailed("broken")
    assert (await world.post({}, **NAMED, **FIRST)).status_code == 502
    world.engine.error = None
    assert (await world.post({}, **NAMED, **RETRY)).status_code == 200


async def test_an_old_answer_is_forgotten(world: World) -> None:
    await world.post({}, **NAMED, **FIRST)
    world.store.clock.now += 601
    await world.post({}, **NAMED, **RETRY)
    assert len(await world.turns()) == 2


async def test_a_first_call_without_a_name_is_answered_once(world: World) -> None:
    first = await world.post({}, **FIRST)
    for again in ("1", "2"):
        assert (await world.post({}, x_stainless_retry_count=again)).json() == first.json()
    assert len(await world.turns()) == len(await world.sessions()) == 1


async def test_a_first_call_without_a_name_is_waited_for(world: World) -> None:
    world.engine.gate.clear()
    first = asyncio.create_task(world.post({}, **FIRST))
    await world.engine.held.wait()
    again = asyncio.create_task(world.post({}, **RETRY))
    (generation,) = world.calls.running
    await until(lambda: generation.holders == 2)
    world.engine.gate.set()
    assert (await again).json() == (await first).json()
    assert len(await world.sessions()) == 1


async def test_failed_calls_without_a_name_are_tried_again_in_their_own_sessions(world: World) -> None:
    """A group's attempts begin with equal calls; the engine is down for all of them, and all of them retry."""
    world.engine.error = EngineFailed("broken")
    failed = await asyncio.gather(*(world.post({}, **FIRST) for _ in range(4)))
    assert {response.status_code for response in failed} == {502}
    world.engine.error_after = 1
    again = await asyncio.gather(*(world.post({}, **RETRY) for _ in range(4)))
    assert {response.status_code for response in again} == {502}
    world.engine.error = None
    answered = await asyncio.gather(*(world.post({}, x_stainless_retry_count="2") for _ in range(4)))
    assert {response.status_code for response in answered} == {200}
    sessions = {response.headers["x-base-rl-session"] for response in answered}
    assert len(sessions) == len(await world.sessions()) == 4
    complete = [turn.session_id for turn in await world.turns() if turn.state == "complete"]
    assert sorted(complete) == sorted(sessions)


async def test_a_client_that_left_tries_again_in_its_session(world: World) -> None:
    world.engine.gate.clear()
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        url, body = f"{address}/v1/chat/completions", {"model": "policy", "messages": [USER]}
        first = asyncio.create_task(client.post(url, json=body, headers={"x-stainless-retry-count": "0"}))
        await world.engine.held.wait()
        first.cancel()
        await until(lambda: bool(world.engine.aborted))
        await until(lambda: not world.calls.running)
        world.engine.gate.set()
        again = await client.post(url, json=body, headers={"x-stainless-retry-count": "1"})
    assert again.json()["choices"][0]["finish_reason"] == "stop"
    assert [turn.state for turn in await world.turns()] == ["truncated", "complete"]
    (session,) = await world.sessions()
    assert again.headers["x-base-rl-session"] == session.id


async def test_a_session_in_which_a_repeated_call_runs_is_not_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt ends without a token only after the second one has begun in its session."""
    monkeypatch.setattr(generation, "ABORT_SECONDS", 0.5)
    world.say("")
    world.engine.deaf = True
    world.engine.gate.clear()
    running = world.calls.running
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        url, body = f"{address}/v1/chat/completions", {"model": "policy", "messages": [USER]}
        first = asyncio.create_task(client.post(url, json=body, headers={"x-stainless-retry-count": "0"}))
        await world.engine.held.wait()
        first.cancel()
        await until(lambda: any(one.abandoned for one in running))
        again = asyncio.create_task(client.post(url, json=body, headers={"x-stainless-retry-count": "1"}))
        await until(lambda: len(running) == 2)
        await until(lambda: len(running) == 1)
        world.engine.gate.set()
        assert (await again).status_code == 200
    assert len(await world.sessions()) == len(await world.turns()) == 1


async def test_a_repetition_of_several_equal_answered_calls_is_a_new_call(world: World) -> None:
    for _ in range(3):
        await world.post({}, **FIRST)
    again = await world.post({}, **RETRY)
    assert again.status_code == 200
    assert len({turn.session_id for turn in await world.turns()}) == 4


async def test_a_repeated_continuing_call_without_a_name_is_answered_once(world: World) -> None:
    for _ in range(2):
        first = (await world.post({})).json()["choices"][0]["message"]
    follow = {"messages": [USER, first, {"role": "user", "content": "And then?"}]}
    second = await world.post(follow, **FIRST)
    assert (await world.post(follow, **RETRY)).json() == second.json()
    assert len(await world.turns()) == 3


async def test_a_call_without_a_name_is_repeated_only_briefly_and_for_its_key(world: World) -> None:
    await world.post({}, **FIRST)
    stranger = await world.store.credentials.create(PrincipalKind.RUN, run_id=world.store.run.id)
    await world.post({}, **RETRY, authorization=f"Bearer {stranger.text}")
    world.store.clock.now += 121
    await world.post({}, **RETRY)
    assert len(await world.sessions()) == 3


async def test_the_oldest_answers_are_forgotten_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ReplayIndex", partial(ReplayIndex, most=2))
    world.restart()
    answers = [(await world.post({"seed": seed}, **FIRST)).json()["id"] for seed in range(3)]
    again = [(await world.post({"seed": seed}, **RETRY)).json()["id"] for seed in (2, 1, 0)]
    assert again[:2] == [answers[2], answers[1]]
    assert again[2] != answers[0]


async def test_equal_calls_are_remembered_up_to_the_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ReplayIndex", partial(ReplayIndex, most_equal=3))
    world.restart()
    world.engine.error, world.engine.error_after = EngineFailed("broken"), 1
    failed = [(await world.post({"stream": True}, **FIRST)).text for _ in range(4)]
    assert all("broken" in text for text in failed), "each in a session, which has the tokens before the error"
    world.engine.error = None
    for _ in range(4):
        assert (await world.post({"stream": True}, **RETRY)).status_code == 200
    assert len(await world.sessions()) == 4 + 1, "the oldest attempt is forgotten: its repetition opens a session"


async def test_an_ended_generation_is_not_kept_in_memory(world: World) -> None:
    world.engine.gate.clear()
    call = asyncio.create_task(world.post({}, **FIRST))
    await world.engine.held.wait()
    (running,) = map(weakref.ref, world.calls.running)
    world.engine.gate.set()
    assert (await call).status_code == 200
    gc.collect()
    assert running() is None


async def test_an_idempotency_key_answers_once_even_without_a_named_session(world: World) -> None:
    responses = await asyncio.gather(*(world.post({}, idempotency_key="k-1") for _ in range(4)))
    assert len({response.json()["id"] for response in responses}) == 1
    (turn,) = await world.turns()
    assert turn.idempotency_key == "k-1"
    assert len(await world.sessions()) == 1


async def test_an_idempotency_key_outlives_the_proxy(world: World) -> None:
    first = await world.post({}, **NAMED, idempotency_key="k-1")
    world.restart()
    assert (await world.post({}, **NAMED, idempotency_key="k-1")).json() == first.json()
    assert len(await world.turns()) == 1


async def test_an_idempotency_key_for_another_request_is_refused(world: World) -> None:
    await world.post({}, idempotency_key="k-1")
    response = await world.post({"seed": 2}, idempotency_key="k-1")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_the_sdk_retries_and_is_answered_once(world: World) -> None:
    """The first attempt's answer is lost, and the SDK retries."""
    lost: list[Any] = []

    async def losing(scope: Any, receive: Any, send: Any) -> None:
        async def lose_first(message: Any) -> None:
            if message["type"] == "http.response.start" and not lost:
                lost.append(message)
                message = {**message, "status": 500}
            await send(message)

        await app(scope, receive, lose_first)

    app, world.app = world.app, losing  # type: ignore[assignment]
    async with world.sdk(max_retries=2, default_headers={"x-base-rl-session": "job"}) as client:
        answer = await client.chat.completions.create(model="policy", messages=[USER])
    world.app = app
    assert answer.choices[0].message.content == "The answer is 42."
    assert lost
    assert [turn.id for turn in await world.turns()] == [answer.id]


async def test_a_key_used_by_another_process_at_the_same_time_loses_no_turn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes looked and found nothing: the second to commit keeps its turn, without the key."""
    await world.post({}, **NAMED, idempotency_key="k-1")

    async def not_yet(*_: Any) -> None:
        return None

    world.restart()  # with nothing in memory
    monkeypatch.setattr(world.trajectories, "answered", not_yet)
    assert (await world.post({}, **NAMED, idempotency_key="k-1")).status_code == 200
    assert [turn.idempotency_key for turn in await world.turns()] == ["k-1", None]
