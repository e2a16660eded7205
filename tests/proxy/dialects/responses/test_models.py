"""The Responses API with models that think, and with constrained answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import BaseModel

from proxy.contract.turn import ConstraintKind
from tests.proxy.calls.world import World, open_world, output_ids
from tests.proxy.dialects.responses.test_stream import events_of, kinds
from tests.proxy.tokens.families import load

CALCULATOR: Any = {"type": "function", "name": "calculator", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"a": 1}}\n</tool_call>'
QUESTION = "What is 17 + 25?"


class Sum(BaseModel):
    total: int


@pytest.fixture
async def thinker(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(tmp_path, load("qwen3")) as world:
        yield world


async def assert_goes_on(world: World) -> None:
    one, two = await world.turns()
    first, second = world.engine.requests
    assert (two.parent_id, two.continuation) == (one.id, "exact")
    path = (*first.input_ids, *output_ids(one))
    assert tuple(second.input_ids[: two.prefix_tokens]) == path


async def test_reasoning_is_an_item_of_its_own(thinker: World) -> None:
    thinker.say("<think>\nLet me add.\n</think>\n\nIt is 42.")
    async with thinker.sdk() as client:
        response = await client.responses.create(model="policy", input=QUESTION)
    thought, message = response.output
    assert isinstance(thought, ResponseReasoningItem)
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["Let me add."]
    assert (message.type, response.output_text) == ("message", "It is 42.")
    assert response.usage is not None
    expected = len(thinker.template.encode("<think>\nLet me add.\n</think>"))
    assert response.usage.output_tokens_details.reasoning_tokens == expected


async def test_reasoning_streams_before_the_answer(thinker: World) -> None:
    thinker.say("<think>\nLet me add.\n</think>\n\nIt is 42.")
    events = await events_of(thinker)
    thoughts = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert len(thoughts) > 1
    assert ("".join(thoughts), "".join(texts)) == ("Let me add.", "It is 42.")
    order = kinds(events)
    assert order.index("reasoning_text.done") < order.index("output_text.delta")
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]


@pytest.mark.parametrize("echo", ["all", "calls", "previous"])
async def test_a_call_after_thinking_continues_with_its_recorded_ids(thinker: World, echo: str) -> None:
    """This holds whether the client sends the reasoning back, drops it, or names the previous response."""
    thinker.say(f"<think>\nLet me see.\n</think>\n\n{CALL}", "<think>\nGood.\n</think>\n\nIt is 42.")
    async with thinker.sdk() as client:
        first = await client.responses.create(model="policy", input=QUESTION, tools=[CALCULATOR])
        call = next(item for item in first.output if isinstance(item, ResponseFunctionToolCall))
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
        asked: list[Any] = [{"role": "user", "content": QUESTION}]
        items: dict[str, list[Any]] = {
            "all": [*asked, *first.output, output],
            "calls": [*asked, call, output],
            "previous": [output],
        }
        second = await client.responses.create(
            model="policy",
            input=items[echo],
            tools=[CALCULATOR],
            previous_response_id=first.id if echo == "previous" else None,
        )
    assert second.output_text == "It is 42."
    await assert_goes_on(thinker)


async def test_an_answer_of_a_model(world: World) -> None:
    world.say('{"total": 42}')
    async with world.sdk() as client:
        response = await client.responses.parse(model="policy", input=QUESTION, text_format=Sum)
    assert response.output_parsed == Sum(total=42)
    constraint = world.engine.requests[0].sampling.constraint
    assert constraint is not None
    assert constraint.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(constraint.text)["properties"] == {"total": {"title": "Total", "type": "integer"}}


async def test_any_json_object(world: World) -> None:
    world.say("{}")
    async with world.sdk() as client:
        await client.responses.create(model="policy", input="JSON", text={"format": {"type": "json_object"}})
    constraint = world.engine.requests[0].sampling.constraint
    assert constraint is not None
    assert json.loads(constraint.text) == {"type": "object"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "calculator"}])
async def test_a_call_that_is_required_is_enforced(world: World, choice: Any) -> None:
    world.say(CALL)
    async with world.sdk() as client:
        response = await client.responses.create(
            model="policy", input=QUESTION, tools=[CALCULATOR], tool_choice=choice
        )
    assert [item.type for item in response.output] == ["function_call"]
    assert world.engine.requests[0].sampling.constraint is not None


async def test_a_custom_tool_that_is_required_is_enforced(world: World) -> None:
    world.say(CALL.replace("calculator", "patch").replace('{"a": 1}', '{"input": "x"}'))
    async with world.sdk() as client:
        response = await client.responses.create(
            model="policy",
            input=QUESTION,
            tools=[{"type": "custom", "name": "patch"}],
            tool_choice={"type": "custom", "name": "patch"},
        )
    assert [item.type for item in response.output] == ["custom_tool_call"]
    constraint = world.engine.requests[0].sampling.constraint
    assert constraint is not None
    assert '"input"' in constraint.text


async def test_an_unenforceable_schema_is_refused_with_its_place(world: World) -> None:
    form: Any = {"type": "json_schema", "name": "x", "schema": {"type": "object", "not": {}}}
    async with world.sdk() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="policy", input=QUESTION, text={"format": form})
    assert caught.value.code == "unsupported_parameter"
    assert str(caught.value.param).startswith("text.format.schema")


async def test_a_strict_tool_that_cannot_be_enforced_is_refused_with_its_place(world: World) -> None:
    strict: Any = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
    space: Any = {"type": "namespace", "name": "n", "description": "N.", "tools": [strict]}
    for tools, place in (([{"type": "web_search"}, strict], "tools[1]"), ([CALCULATOR, space], "tools[1].tools[0]")):
        response = await world.http.post("/v1/responses", json={"model": "policy", "input": "x", "tools": tools})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith(f"{place}.parameters")
