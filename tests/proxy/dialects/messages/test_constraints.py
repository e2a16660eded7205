"""Constraints on answers in Anthropic's wire format: an output format, a required call, a tool's schema."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pydantic
import pytest

from proxy.contract.turn import ConstraintKind
from tests.proxy.calls.world import CALL, USER, World
from tests.proxy.dialects.messages.anthropic_client import ASKED, TOOL, answer, ask, sdk

SCHEMA: Any = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
FORMAT: Any = {"type": "json_schema", "schema": SCHEMA}
ANY: Any = {"type": "any"}


class Sum(pydantic.BaseModel):
    total: int


def constraint(world: World) -> Any:
    sent = world.engine.requests[-1].sampling.constraint
    assert sent is not None
    return sent


@pytest.mark.parametrize("body", [{"output_format": FORMAT}, {"output_config": {"format": FORMAT}}])
async def test_an_output_format_is_enforced(world: World, body: Any) -> None:
    await answer(world, **body)
    assert constraint(world).kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(constraint(world).text) == SCHEMA


async def test_the_sdk_parses_what_it_asked_for(world: World) -> None:
    world.say('{"total": 42}')
    async with sdk(world) as client:
        parsed = await client.messages.parse(**ASKED, output_format=Sum)
        async with client.messages.stream(**ASKED, output_format=Sum) as stream:
            streamed = await stream.get_final_message()
    assert parsed.parsed_output == streamed.parsed_output == Sum(total=42)
    assert json.loads(constraint(world).text)["required"] == ["total"]


@pytest.mark.parametrize("choice", [ANY, {"type": "tool", "name": "calculator"}])
async def test_a_call_is_required(world: World, choice: Any) -> None:
    world.say(CALL)
    message = await answer(world, tools=[TOOL], tool_choice=choice)
    assert message["stop_reason"] == "tool_use"
    assert "calculator" in constraint(world).text


async def test_strict_tools_are_enforced(world: World) -> None:
    await answer(world, tools=[{**TOOL, "input_schema": SCHEMA, "strict": True}])
    assert "total" in constraint(world).text


async def test_a_call_without_constraints_has_none(world: World) -> None:
    await answer(world, tools=[TOOL], tool_choice={"type": "auto"}, output_config={"effort": None})
    assert world.engine.requests[-1].sampling.constraint is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"output_format": {"type": "json_schema", "schema": {"type": "nothing"}}}, "output_format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/x"}}}}, "output_config.format"),
        ({"tools": [TOOL | {"input_schema": {"$ref": "#/x"}, "strict": True}]}, "tools[0].input_schema"),
        ({"messages": [USER, {"role": "assistant", "content": "{"}], "output_format": FORMAT}, "messages"),
        (
            {"messages": [USER, {"role": "assistant", "content": "I"}], "tools": [TOOL], "tool_choice": ANY},
            "messages",
        ),
    ],
)
async def test_unenforceable_constraints_are_refused(world: World, body: Any, param: str) -> None:
    response = await ask(world, **body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_parameter")
    assert error["param"].startswith(param)
    assert world.engine.requests == []


async def test_an_engine_without_grammar_refuses(world: World) -> None:
    world.engine.grammar_backend = "none"
    async with sdk(world) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**ASKED, tools=[TOOL], tool_choice=ANY)
    assert caught.value.type == "invalid_request_error"
