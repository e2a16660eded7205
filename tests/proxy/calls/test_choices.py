"""Calls with `n` above one: several answers to one prompt, each a turn of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.calls.generation import CHOICES_AT_ONCE
from proxy.errors import EngineFailed
from proxy.tokens.template import ChatTemplate
from proxy.turns.assembly import assemble
from proxy.turns.repository import TurnRepository
from tests.proxy.calls.world import CALL, TOOLS, USER, World, listening, open_world, output_ids, until
from tests.running_app import bearer

TEXTS = ("One.", "Two is longer.", "And three.")


async def turns_of(world: World) -> list[Any]:
    """Return the turns in the order of recording: ids made within one millisecond have no order."""
    return sorted(await world.turns(), key=lambda turn: turn.ordinal)


def chunks(text: str) -> list[dict[str, Any]]:
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_n_choices_are_answered_in_order(world: World) -> None:
    world.say(*TEXTS)
    answer = (await world.post({"n": 3})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == list(TEXTS)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


async def test_each_choice_is_a_turn_of_its_own_and_a_sibling_of_the_others(world: World) -> None:
    first = await world.post({"x": 1}, x_base_rl_session="job")
    said = first.json()["choices"][0]["message"]
    world.say(*TEXTS)
    response = await world.post(
        {"n": 3, "messages": [USER, said, {"role": "user", "content": "Again?"}]}, x_base_rl_session="job"
    )
    parent, *siblings = await turns_of(world)
    assert {turn.parent_id for turn in siblings} == {parent.id}
    assert [output_ids(turn) for turn in siblings] == [request_ids(world, text) for text in TEXTS]
    assert len({turn.prompt_ids for turn in siblings}) == 1
    assert response.json()["id"] == response.headers["x-base-rl-turn"] == siblings[0].id
    assert [choice["turn_id"] for choice in response.json()["choices"]] == [turn.id for turn in siblings]
    assert len(world.seen.turns) == 4


async def test_only_the_continued_choice_gets_the_reward(world: World) -> None:
    """A call with three choices, of which the agent continues the second, and a last call with two."""
    world.say(*TEXTS)
    said = (await world.post({"n": 3}, x_base_rl_session="job")).json()["choices"][1]["message"]
    world.say("Yes.", "No.")
    messages = [USER, said, {"role": "user", "content": "Sure?"}]
    await world.post({"n": 2, "messages": messages}, x_base_rl_session="job")
    first, *_ = await turns_of(world)
    await world.http.post(f"/v1/sessions/{first.session_id}/end", json={})
    turns = await world.store.database.read(
        lambda connection: TurnRepository(connection).turns_of({first.session_id: 5})[first.session_id]
    )
    trajectory = assemble(turns, session_id=first.session_id, group_id=None, task=None, reward=1.0, turn_rewards={})
    assert [turn.superseded for turn in trajectory.turns] == [True, False, True, False, False]
    assert all(turn.trainable for turn in trajectory.turns)


def request_ids(world: World, text: str) -> list[int]:
    return [*world.template.encode(text), world.template.stop_ids[0]]


async def test_prompt_tokens_are_counted_once(world: World) -> None:
    one = (await world.post({})).json()["usage"]
    world.say(*TEXTS)
    usage = (await world.post({"n": 3})).json()["usage"]
    assert usage["prompt_tokens"] == one["prompt_tokens"]
    assert usage["completion_tokens"] == sum(len(request_ids(world, text)) for text in TEXTS)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_a_single_choice_names_its_turn_by_the_id_alone(world: World) -> None:
    assert "turn_id" not in (await world.post({"n": 1})).json()["choices"][0]


async def test_n_up_to_128(world: World) -> None:
    assert len((await world.post({"n": 128})).json()["choices"]) == 128
    assert len(await turns_of(world)) == 128
    response = await world.post({"n": 129})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_any_choice_can_be_continued(world: World) -> None:
    world.say(*TEXTS)
    answer = (await world.post({"n": 3})).json()
    chosen = answer["choices"][1]["message"]
    await world.post({"messages": [USER, chosen, {"role": "user", "content": "Why?"}]})
    turns = await turns_of(world)
    assert turns[3].parent_id == answer["choices"][1]["turn_id"] == turns[1].id
    assert turns[3].continuation == "exact"
    assert len(await world.sessions()) == 1


async def test_a_stream_of_choices_is_interleaved_with_one_role_and_one_finish_each(world: World) -> None:
    world.say(*TEXTS)
    response = await world.post({"n": 3, "stream": True, "stream_options": {"include_usage": True}})
    *told, usage = chunks(response.text)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == sum(len(request_ids(world, text)) for text in TEXTS)
    assert all(len(chunk["choices"]) == 1 for chunk in told)
    order = [chunk["choices"][0]["index"] for chunk in told]
    contents = [
        index for index, chunk in zip(order, told, strict=True) if chunk["choices"][0]["delta"].get("content")
    ]
    assert contents != sorted(contents), "choices come as they are generated, not one after the other"
    for index, text in enumerate(TEXTS):
        own = [chunk["choices"][0] for chunk in told if chunk["choices"][0]["index"] == index]
        assert ["role" in choice["delta"] for choice in own] == [True] + [False] * (len(own) - 1)
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert own[-1]["turn_id"] == (await turns_of(world))[index].id


async def test_tool_calls_of_each_choice_are_numbered_from_zero(world: World) -> None:
    world.say(CALL, f"Both:\n{CALL}\n{CALL}")
    response = await world.post({"n": 2, "tools": TOOLS, "stream": True})
    calls = [
        (chunk["choices"][0]["index"], call["index"])
        for chunk in chunks(response.text)
        for call in chunk["choices"][0]["delta"].get("tool_calls", [])
        if "id" in call
    ]
    assert sorted(calls) == [(0, 0), (1, 0), (1, 1)]


async def test_one_seed_gives_each_choice_its_own(world: World) -> None:
    await world.post({"n": 3, "seed": 2**63 - 2})
    assert [request.sampling.seed for request in world.engine.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [turn.sampling["seed"] for turn in await turns_of(world)] == [2**63 - 2, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_replays_all_choices(world: World, stream: bool) -> None:
    world.say(*TEXTS)
    first = await world.post({"n": 3, "stream": stream}, x_base_rl_session="job", x_stainless_retry_count="0")
    again = await world.post({"n": 3, "stream": stream}, x_base_rl_session="job", x_stainless_retry_count="1")
    assert len(await turns_of(world)) == 3
    if not stream:
        assert again.json() == first.json()
        return
    for text in TEXTS:
        assert text in again.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks(again.text)][-3:] == ["stop"] * 3


async def test_an_idempotency_key_replays_all_choices_after_a_restart(world: World) -> None:
    world.say(*TEXTS)
    first = await world.post({"n": 3, "logprobs": True}, x_base_rl_session="job", idempotency_key="k")
    world.restart()
    again = await world.post({"n": 3, "logprobs": True}, x_base_rl_session="job", idempotency_key="k")
    assert again.json() == first.json()
    assert [turn.idempotency_key for turn in await turns_of(world)] == ["k", None, None]


async def test_when_one_choice_fails_the_call_does_and_none_is_lost(world: World) -> None:
    world.say(*TEXTS)
    world.engine.error, world.engine.error_after = EngineFailed("broken"), 3
    response = await world.post({"n": 3, "stream": True}, x_base_rl_session="job", idempotency_key="k")
    assert '"broken"' in response.text
    await until(lambda: not world.calls.running)
    assert {turn.state for turn in await turns_of(world)} == {"failed"}
    world.engine.error = None
    world.say(*TEXTS)
    again = await world.post({"n": 3}, x_base_rl_session="job", idempotency_key="k2")
    assert len(again.json()["choices"]) == 3


async def test_a_client_that_leaves_ends_all_choices_and_each_is_kept(world: World) -> None:
    world.say(*TEXTS)
    world.engine.gate.clear()
    asked = {"model": "policy", "messages": [USER], "n": 3}
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        call = asyncio.create_task(client.post(f"{address}/v1/chat/completions", json=asked))
        await until(lambda: len(world.engine.requests) == 3)
        await world.engine.held.wait()
        call.cancel()
        await until(lambda: not world.calls.running)
    turns = await turns_of(world)
    assert {turn.state for turn in turns} == {"truncated"}
    assert set(world.engine.aborted) == {turn.id for turn in turns}


async def test_choices_wait_for_their_places(tmp_path: Path, template: ChatTemplate) -> None:
    async with open_world(tmp_path, template, concurrency=2) as world:
        world.engine.gate.clear()
        call = asyncio.create_task(world.post({"n": 5}))
        await until(lambda: len(world.engine.requests) == 2)
        await world.engine.held.wait()
        assert len(world.engine.requests) == 2
        world.engine.gate.set()
        assert len((await call).json()["choices"]) == 5


async def test_choices_of_one_call_go_to_the_engine_some_at_a_time(world: World) -> None:
    world.engine.gate.clear()
    call = asyncio.create_task(world.post({"n": CHOICES_AT_ONCE + 8}))
    await until(lambda: len(world.engine.requests) == CHOICES_AT_ONCE)
    other = asyncio.create_task(world.post({}))
    await until(lambda: len(world.engine.requests) == CHOICES_AT_ONCE + 1)
    world.engine.gate.set()
    assert len((await call).json()["choices"]) == CHOICES_AT_ONCE + 8
    assert (await other).status_code == 200


async def test_choices_that_wait_when_their_client_leaves_are_not_sent_to_the_engine(world: World) -> None:
    world.engine.gate.clear()
    asked = {"model": "policy", "messages": [USER], "n": CHOICES_AT_ONCE + 8}
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        call = asyncio.create_task(client.post(f"{address}/v1/chat/completions", json=asked))
        await until(lambda: len(world.engine.requests) == CHOICES_AT_ONCE)
        await world.engine.held.wait()
        call.cancel()
        await until(lambda: not world.calls.running)
    assert len(world.engine.requests) == CHOICES_AT_ONCE
