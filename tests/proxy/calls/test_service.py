"""Sessions, prefix reuse, attribution: the records that successive calls make in the store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.contract.arrays import unpack_ids
from proxy.contract.policy import weight_label
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.world import CALL, TOOLS, USER, World, open_world, output_ids, until


async def paths(world: World) -> list[tuple[int, ...]]:
    """Return every turn's full prompt and output, joined along its parents."""
    whole: dict[str, tuple[int, ...]] = {}
    for turn in await world.turns():
        prefix = whole[turn.parent_id][: turn.prefix_tokens] if turn.parent_id else ()
        whole[turn.id] = prefix + unpack_ids(turn.prompt_ids) + unpack_ids(turn.output_ids)
    return list(whole.values())


def message(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["choices"][0]["message"]
    return found


async def test_a_conversation_continues_in_its_session_with_its_recorded_ids(world: World) -> None:
    world.say(CALL, "The answer is 42.")
    first = await world.post({"tools": TOOLS})
    echo = message(first)
    echo["tool_calls"][0]["function"]["arguments"] = '{"op": "+", "a": 17, "b": 25}'
    echo["tool_calls"][0]["id"] = "mine"
    result = {"role": "tool", "tool_call_id": "mine", "content": [{"type": "text", "text": "42"}]}
    second = await world.post({"tools": TOOLS, "messages": [USER, echo, result]})

    one, two = await world.turns()
    assert one.session_id == two.session_id
    assert (one.continuation, two.continuation) == ("new", "exact")
    assert two.parent_id == one.id
    assert two.messages == [result]
    asked = world.engine.requests
    assert asked[1].input_ids[: two.prefix_tokens] == (*asked[0].input_ids, *output_ids(one))
    assert asked[1].input_ids == (*(await paths(world))[0], *unpack_ids(two.prompt_ids))
    usage = second.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == two.prefix_tokens
    assert [attributed for _, attributed in world.seen.turns] == ["new", "conversation"]


async def test_the_recorded_path_equals_the_engines_prompt(world: World) -> None:
    _, key = await world.session_key()
    messages = [USER]
    for _ in range(4):
        answer = message(await world.post({"messages": messages}, authorization=f"Bearer {key}"))
        messages = [*messages, answer, {"role": "user", "content": "And then?"}]
    whole = await paths(world)
    for path, turn, request in zip(whole, await world.turns(), world.engine.requests, strict=True):
        assert path == (*request.input_ids, *output_ids(turn))
    assert [turn.continuation for turn in await world.turns()] == ["new", "exact", "exact", "exact"]


async def test_an_edited_history_is_a_branch_in_the_same_session(world: World) -> None:
    _, key = await world.session_key()
    await world.post({}, authorization=f"Bearer {key}")
    edited = [{"role": "user", "content": "What is 17 - 25?"}]
    await world.post({"messages": edited}, authorization=f"Bearer {key}")
    one, two = await world.turns()
    assert (two.continuation, two.parent_id, two.messages) == ("edited", one.id, edited)
    assert 0 < two.prefix_tokens < one.prompt_token_count
    assert (await paths(world))[1][: two.prompt_token_count] == world.engine.requests[1].input_ids


async def test_an_answer_cut_by_length_is_continued_by_prompt_tokens(world: World) -> None:
    first = message(await world.post({"max_tokens": 2}))
    await world.post({"messages": [USER, first, {"role": "user", "content": "Go on."}]})
    one, two = await world.turns()
    assert (one.finish_reason, two.continuation) == ("length", "exact")
    stop = world.template.stop_ids[0]
    assert stop not in output_ids(one)
    assert unpack_ids(two.prompt_ids)[0] == stop


async def test_unnamed_first_calls_open_sessions_of_their_own(world: World) -> None:
    await asyncio.gather(world.post({}), world.post({}))
    assert len(await world.sessions()) == 2


async def test_a_header_names_the_session_and_its_group(world: World) -> None:
    for _ in range(2):
        await world.post({}, x_base_rl_session="job-7", x_base_rl_group="task-1")
    (session,) = await world.sessions()
    assert (session.external_id, session.attributed_by, session.turn_count) == ("job-7", "header", 2)
    assert session.group_id is not None


async def test_a_swap_in_mid_answer_gives_spans_of_both_versions(world: World) -> None:
    world.engine.gate.clear()
    call = asyncio.create_task(world.post({"stream": True}))
    await world.engine.held.wait()
    world.set_version(1)
    world.engine.gate.set()
    response = await call
    (turn,) = await world.turns()
    length = len(output_ids(turn))
    assert turn.spans == [[0, 0, length - 1], [1, length - 1, length]]
    assert '"policy@1"' in response.text


@pytest.mark.parametrize("label", ["default", "run_of_somebody_else@3"])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_unknown_weights_are_not_recorded(world: World, label: str, stream: bool) -> None:
    world.engine.label = label
    response = await world.post({"stream": stream})
    assert "cannot be attributed" in response.text
    assert "invalid_engine_reply" in response.text
    assert response.status_code == (200 if stream else 502)
    (turn,) = await world.turns()
    assert (turn.state, output_ids(turn), turn.spans) == ("failed", [], [])


async def test_engines_with_labels_of_other_runs_are_distinguished_by_run(world: World) -> None:
    world.engine.label = weight_label(world.store.run.id, 12)
    await world.post({})
    assert (await world.turns())[0].spans[0][0] == 12


async def test_the_turn_is_on_disk_before_the_last_chunk(world: World) -> None:
    seen: list[int] = []
    stream = world.http.stream(
        "POST", "/v1/chat/completions", json={"model": "policy", "messages": [USER], "stream": True}
    )
    async with stream as response:
        async for line in response.aiter_lines():
            if '"finish_reason":"stop"' in line:
                seen.append(len(await world.turns()))
    assert seen == [1]


async def test_calls_beyond_the_bound_wait(tmp_path: Path, template: ChatTemplate) -> None:
    async with open_world(tmp_path, template, concurrency=1) as world:
        world.engine.gate.clear()
        calls = [asyncio.create_task(world.post({})) for _ in range(3)]
        await world.engine.held.wait()
        await until(lambda: len(world.calls.running) == 3)
        assert len(world.engine.requests) == 1
        world.engine.gate.set()
        assert [response.status_code for response in await asyncio.gather(*calls)] == [200] * 3


async def test_shutdown_ends_what_generates_and_keeps_it(world: World) -> None:
    world.engine.gate.clear()
    call = asyncio.create_task(world.post({}))
    await world.engine.held.wait()
    await world.calls.aclose()
    response = await call
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert [turn.state for turn in await world.turns()] == ["truncated"]
