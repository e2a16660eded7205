"""Structured output from end to end: OpenAI's SDK, the proxy, the embedded engine, a model with random weights."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import msgspec
import openai
import pytest
import torch
from pydantic import BaseModel, Field

from proxy.cli.addresses import random_free_port
from proxy.contract.turn import ConstraintKind, SamplingParameters
from proxy.engines.launch import embedded_plan, wait_until_ready
from proxy.engines.sglang import SglangEngine
from proxy.settings import EngineSettings
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.world import USER, World, open_world
from tests.proxy.tokens.models import write_model
from tests.small_models import small_qwen3

STOP_SECONDS = 30
MESSAGES: Any = [USER]


class Place(BaseModel):
    kind: Literal["city", "village"]
    zip: str = Field(max_length=4)


class Person(BaseModel):
    name: Literal["Ada", "Alan"]
    born: int = Field(ge=1800, le=1999)
    alive: bool
    home: Place | None
    tags: list[Literal["x", "y"]] = Field(max_length=2)


class Weather(BaseModel):
    """The weather."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


class Note(BaseModel):
    """Takes a note."""

    text: str = Field(max_length=6)


TOOLS: list[Any] = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Note)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model(tmp_path_factory.mktemp("structured") / "model")
    vocabulary = ChatTemplate.load(str(directory)).vocabulary_size
    network = small_qwen3(
        vocab_size=vocabulary,
        num_hidden_layers=1,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(0))
    network.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    plan = embedded_plan(model=str(model), port=random_free_port("127.0.0.1"))
    process = subprocess.Popen(plan.argv, env={**os.environ, **plan.env})
    try:
        asyncio.run(wait_until_ready(plan.url, timeout=300, process_alive=lambda: process.poll() is None))
        yield plan.url
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


@pytest.fixture
async def world(address: str, model: Path, tmp_path: Path) -> AsyncIterator[World]:
    engine = SglangEngine(address, EngineSettings(url=address))
    async with open_world(tmp_path, ChatTemplate.load(str(model)), serving=engine) as opened:
        yield opened
    await engine.aclose()


async def test_parse_gives_an_object_of_the_class(world: World) -> None:
    async with world.sdk() as client:
        for temperature in (1.0, 2.0):
            answer = await client.chat.completions.parse(
                model="policy", messages=MESSAGES, response_format=Person, temperature=temperature
            )
            assert isinstance(answer.choices[0].message.parsed, Person)
            assert answer.choices[0].finish_reason == "stop"
    for turn in await world.turns():
        sampling = msgspec.convert(turn.sampling, SamplingParameters)
        assert sampling.constraint is not None, "it is recorded with the turn"
        assert sampling.constraint.kind is ConstraintKind.JSON_SCHEMA


async def test_a_stream_is_parsed_as_it_comes(world: World) -> None:
    async with (
        world.sdk() as client,
        client.chat.completions.stream(model="policy", messages=MESSAGES, response_format=Person) as stream,
    ):
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "content.delta" in kinds
    assert isinstance(final.choices[0].message.parsed, Person)


async def test_several_choices_obey_each_for_itself(world: World) -> None:
    async with world.sdk() as client:
        answer = await client.chat.completions.parse(
            model="policy", messages=MESSAGES, response_format=Weather, n=3, seed=1
        )
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert all(isinstance(choice.message.parsed, Weather) for choice in answer.choices)


async def test_any_json_object(world: World) -> None:
    closing = {str(token): 6.0 for text in ("}", '"', "]") for token in world.template.encode(text)}
    response = await world.post({"response_format": {"type": "json_object"}, "logit_bias": closing})
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_can_be_required(world: World, *, stream: bool) -> None:
    async with (
        world.sdk() as client,
        client.chat.completions.stream(
            model="policy", messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=stream
        ) as events,
    ):
        answer = await events.get_final_completion()
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert isinstance(call.function.parsed_arguments, Weather | Note)
    if not stream:
        assert len(choice.message.tool_calls) == 1


async def test_a_named_function_is_called(world: World) -> None:
    for tools in (TOOLS, [{"type": "function", "function": {"name": "Note", "parameters": {"type": "object"}}}]):
        named: Any = {"type": "function", "function": {"name": "Note"}}
        closing = {str(token): 6.0 for text in ("}", '"', "]") for token in world.template.encode(text)}
        response = await world.post(
            {"tools": tools, "tool_choice": named, "parallel_tool_calls": False, "logit_bias": closing}
        )
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "Note"
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


async def test_strict_tools_hold_the_calls_that_the_model_makes_by_itself(world: World) -> None:
    """A bias towards the marker makes the model call."""
    (marker,) = world.template.added_ids(("<tool_call>",))
    body = {"tools": TOOLS, "logit_bias": {str(marker): 5.0, "2": 4.0}, "n": 16, "max_tokens": 300}
    choices = (await world.post(body)).json()["choices"]
    calls = [call for choice in choices for call in choice["message"].get("tool_calls") or ()]
    assert calls
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])


async def test_an_answer_or_a_call(world: World) -> None:
    """With a schema for the answer and tools beside it, an answer is either of them. A bias against or towards the
    marker of a call decides which one the model writes."""
    (marker,) = world.template.added_ids(("<tool_call>",))
    for bias, kinds in ((0, {"stop", "tool_calls"}), (-100, {"stop"}), (100, {"tool_calls"})):
        body = {"tools": TOOLS, "response_format": openai_format(Weather), "n": 4, "logit_bias": {str(marker): bias}}
        choices = (await world.post(body)).json()["choices"]
        assert len(choices) == 4
        for choice in choices:
            assert choice["finish_reason"] in kinds
            if choice["finish_reason"] == "stop":
                Weather.model_validate_json(choice["message"]["content"])
            else:
                assert choice["message"]["tool_calls"]
                assert not choice["message"]["content"]


def openai_format(kind: type[BaseModel]) -> dict[str, Any]:
    schema = {**kind.model_json_schema(), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": kind.__name__, "schema": schema, "strict": True}}


async def test_a_cut_answer_is_marked(world: World) -> None:
    async with world.sdk() as client:
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(
                model="policy", messages=MESSAGES, response_format=Person, max_completion_tokens=5
            )
    response = await world.post({"tools": TOOLS, "tool_choice": "required", "max_tokens": 5})
    assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_a_request_refused_by_the_engine_is_a_400_with_the_reason(world: World) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        response = await world.post({"response_format": form, "stream": stream})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "response_format.json_schema")
        assert error["code"] == "unsupported_parameter"
        assert "look-ahead" in error["message"]
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    response = await world.post({"tools": tools})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert await world.turns() == []


async def test_the_other_dialects_promise_the_same(world: World) -> None:
    async with world.sdk() as client:
        parsed = await client.responses.parse(model="policy", input="x", text_format=Weather)
        assert isinstance(parsed.output_parsed, Weather)
        called = await client.responses.parse(
            model="policy", input="x", tools=TOOLS_FOR_RESPONSES, tool_choice="required"
        )
        assert [item.type for item in called.output] == ["function_call"] * len(called.output)
    schema = {**Weather.model_json_schema(), "additionalProperties": False}  # otherwise it writes calls without end
    tool = {"name": "weather", "input_schema": schema}
    message = {
        "model": "policy",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    answer = (await world.http.post("/v1/messages", json=message)).json()
    assert answer["stop_reason"] == "tool_use"
    Weather.model_validate(answer["content"][0]["input"])


TOOLS_FOR_RESPONSES: list[Any] = [
    {
        "type": "function",
        "name": tool["function"]["name"],
        "strict": True,
        "parameters": tool["function"]["parameters"],
    }
    for tool in TOOLS
]


async def test_top_logprobs_under_a_constraint(world: World) -> None:
    body = {"response_format": openai_format(Weather), "logprobs": True, "top_logprobs": 20}
    content = (await world.post(body)).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"][0]["token"].startswith("{"), "nothing else can begin the answer"
    assert all(entry["top_logprobs"][0]["logprob"] <= 0.0 for entry in content)
