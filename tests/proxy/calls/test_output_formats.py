"""Tool calls and reasoning of every family of models, over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.calls.world import TOOLS, USER, World, open_world, output_ids, until
from tests.proxy.dialects.chat.test_dialect import chunks_of
from tests.proxy.tokens.families import FAMILIES, load
from tests.proxy.tokens.test_output import message, output_of

LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "far": {"type": "integer"}}},
}
LOOKING = [{"type": "function", "function": LOOK}]
GIVEN = {"at": "é\n<b>", "far": 3}

Open = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def of(name: str, **run: Any) -> AsyncIterator[World]:
        async with open_world(tmp_path, load(name), run) as world:
            yield world

    return of


def calling(name: str, count: int = 1, thought: str = "") -> str:
    """Return an answer with this many calls, as the family's models write it."""
    calls = output_of(load(name), message([("look", GIVEN)] * count)).split("</think>\n\n")[-1]
    if load(name).render([USER], None, generation_prompt=True).endswith("<think>\n"):
        return f"{thought}\n</think>\n\n{calls}"
    return f"<think>\n{thought}\n</think>\n\n{calls}" if thought else calls


async def answer(world: World, **body: Any) -> dict[str, Any]:
    response = await world.post(body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def given(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("name", FAMILIES)
async def test_calls_of_every_family_are_parsed_and_their_conversation_continues(opened: Open, name: str) -> None:
    """A client drops the reasoning, and the second call continues the recorded ids."""
    count = 1 if load(name).single_calls else 2
    async with opened(name) as world:
        thought = "hm" if FAMILIES[name].reasoning else ""
        world.say(calling(name, count, thought), "It is a tree.")
        choice = await answer(world, tools=LOOKING)
        calls = choice["message"]["tool_calls"]
        assert given(calls) == [("look", GIVEN)] * count
        assert len({call["id"] for call in calls}) == count
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"].get("reasoning_content") == (thought or None)
        assert choice["message"]["content"] is None
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "a tree"} for call in calls]
        echoed = {"role": "assistant", "content": None, "tool_calls": calls}
        await answer(world, tools=LOOKING, messages=[USER, echoed, *results])
        first, second = await world.turns()
        assert second.continuation == ("retemplated" if name == "r1" else "exact")
        assert second.parent_id == first.id


@pytest.mark.parametrize("name", FAMILIES)
async def test_calls_of_every_family_in_a_stream(opened: Open, name: str) -> None:
    async with opened(name) as world:
        world.say(calling(name))
        chunks = await chunks_of(world, tools=LOOKING)
        parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert [part["index"] for part in parts] == [0, 0]
        assert (parts[0]["type"], parts[0]["function"]["name"]) == ("function", "look")
        assert json.loads("".join(part["function"]["arguments"] for part in parts)) == GIVEN
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_malformed_call_is_returned_as_text(opened: Open, name: str) -> None:
    async with opened(name) as world:
        text = calling(name).replace("look", "lo<ok", 1)[:-3]
        world.say(text)
        said = (await answer(world, tools=LOOKING))["message"]
        assert "tool_calls" not in said
        assert said["content"] == text.removeprefix("\n</think>\n\n")


async def test_reasoning_is_separated(opened: Open) -> None:
    async with opened("qwen3") as world:
        world.say("<think>\nLet me add.\n</think>\n\nIt is 42.")
        response = (await world.post({})).json()
        said = response["choices"][0]["message"]
        assert (said["reasoning_content"], said["content"]) == ("Let me add.", "It is 42.")
        before = "<think>\nLet me add.\n</think>"
        expected = len(world.template.encode(before))
        assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
        assert output_ids((await world.turns())[0]) == world.answers[0]


async def test_reasoning_streams_before_the_answer(opened: Open) -> None:
    async with opened("qwen3") as world:
        world.say("<think>\nLet me add.\n</think>\n\nIt is 42.")
        deltas = [chunk["choices"][0]["delta"] for chunk in await chunks_of(world)]
        thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
        texts = [delta["content"] for delta in deltas if delta.get("content")]
        assert len(thoughts) > 1
        assert ("".join(thoughts), "".join(texts)) == ("Let me add.", "It is 42.")
        kinds = [next(iter(delta)) for delta in deltas[1:] if delta]
        assert kinds == ["reasoning_content"] * len(thoughts) + ["content"] * len(texts)


async def test_a_thought_that_the_prompt_opened(opened: Open) -> None:
    async with opened("qwen3_thinking") as world:
        world.say("Let me add.\n</think>\n\nIt is 42.", "so it is")
        said = (await answer(world))["message"]
        assert (said["reasoning_content"], said["content"]) == ("Let me add.", "It is 42.")
        cut = (await answer(world))["message"]
        assert (cut["reasoning_content"], cut["content"]) == ("so it is", "")


async def test_a_conversation_whose_template_strips_thoughts_branches_when_the_user_speaks(opened: Open) -> None:
    async with opened("qwen3") as world:
        world.say("<think>\nhm\n</think>\n\nIt is 42.")
        said = (await answer(world))["message"]
        for echoed in (said, {"role": "assistant", "content": said["content"]}):
            await answer(world, messages=[USER, echoed, USER])
            second = (await world.turns())[-1]
            assert second.continuation == "retemplated"
            prompt = world.engine.requests[-1].input_ids
            assert "hm" not in world.template.tokenizer.decode(list(prompt), skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_those_of_the_answer_alone(opened: Open, stream: bool) -> None:
    async with opened("qwen3") as world:
        world.say("<think>\nhm\n</think>\n\nyes" + calling("hermes") + "\nno")
        if stream:
            chunks = await chunks_of(world, logprobs=True, tools=LOOKING)
            logprobs = [chunk["choices"][0]["logprobs"] or {} for chunk in chunks]
            entries = [entry for each in logprobs for entry in each.get("content", ())]
        else:
            entries = (await answer(world, logprobs=True, tools=LOOKING))["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries).split() == ["yes", "no"]


async def test_argument_values_have_the_types_of_the_tools_schema(opened: Open) -> None:
    async with opened("qwen3_coder") as world:
        world.say(calling("qwen3_coder"))
        calls = (await answer(world, tools=LOOKING))["message"]["tool_calls"]
        assert given(calls) == [("look", GIVEN)]
        calls = (await answer(world, tools=TOOLS))["message"]["tool_calls"]
        assert given(calls) == [("look", {**GIVEN, "far": "3"})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["llama3", "mistral_named"])
async def test_a_single_call_is_enforced_without_a_stop_string(opened: Open, name: str, stream: bool) -> None:
    """The generation is aborted when the call is complete, and the turn is complete."""
    async with opened(name) as world:
        world.say(calling(name, 2))
        world.engine.gate.clear()
        body = {"tools": LOOKING, "parallel_tool_calls": False}
        if stream:
            chunks = await chunks_of(world, **body)
            parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
            ids, reason = {part["index"] for part in parts}, chunks[-1]["choices"][0]["finish_reason"]
        else:
            choice = await answer(world, **body)
            ids, reason = {index for index, _ in enumerate(choice["message"]["tool_calls"])}, choice["finish_reason"]
        assert (ids, reason) == ({0}, "tool_calls")
        turn = (await world.turns())[0]
        assert world.engine.aborted == [turn.id]
        assert turn.state == "complete"
        assert turn.finish_reason == "tool_calls"
        assert world.engine.requests[0].sampling.stop == ()
        await until(world.engine.held.is_set)


async def test_a_template_with_a_single_call_gets_a_single_call(opened: Open) -> None:
    """Llama's own template refuses an answer with more, so the next request would be refused."""
    async with opened("llama3_single") as world:
        world.say(calling("llama3", 2))
        said = (await answer(world, tools=LOOKING))["message"]
        assert len(said["tool_calls"]) == 1
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a tree"}
        await answer(world, tools=LOOKING, messages=[USER, said, result])
        assert (await world.turns())[1].continuation == "exact"


async def test_the_run_sets_the_formats_of_calls_and_thoughts(opened: Open) -> None:
    async with opened("qwen3", tool_parser="mistral", reasoning_parser="none") as world:
        world.say('<think>hm</think>[TOOL_CALLS]look[ARGS]{"far": 3}')
        said = (await answer(world, tools=LOOKING))["message"]
        assert given(said["tool_calls"]) == [("look", {"far": 3})]
        assert said["content"] == "<think>hm</think>"
        assert "reasoning_content" not in said


async def test_tools_with_an_unknown_format_cause_a_warning(opened: Open) -> None:
    async with opened("hermes", tool_parser="none") as world:
        world.say(calling("hermes"))
        response = await world.post({"tools": LOOKING})
        assert "run.tool_parser" in response.headers["x-base-rl-warning"]
        assert response.json()["choices"][0]["message"]["content"] == calling("hermes")
        assert "x-base-rl-warning" not in (await world.post({})).headers


async def test_a_retry_tells_the_thought_again(opened: Open) -> None:
    async with opened("qwen3") as world:
        world.say("<think>\nhm\n</think>\n\nIt is 42.")
        first = await world.post({}, idempotency_key="once")
        again = await world.post({"stream": True}, idempotency_key="other")
        assert "reasoning_content" in again.text
        assert (await world.post({}, idempotency_key="once")).json() == first.json()
