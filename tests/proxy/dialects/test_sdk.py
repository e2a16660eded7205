"""OpenAI's SDK and its helpers on a real connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai import AsyncStream
from openai.types import Completion
from pydantic import BaseModel

from tests.proxy.calls.world import CALL, TOOLS, USER, World

ASKED: dict[str, Any] = {"model": "policy", "messages": [USER]}


class Result(BaseModel):
    value: int
    unit: str


class Calculator(BaseModel):
    """Computes."""

    a: int
    b: int
    op: Literal["+", "-"]


async def test_parse_gives_the_clients_own_type(world: World) -> None:
    world.say('{"value": 42, "unit": "m"}')
    async with world.sdk() as client:
        answer = await client.chat.completions.parse(**ASKED, response_format=Result)
    assert answer.choices[0].message.parsed == Result(value=42, unit="m")
    assert world.engine.requests[0].sampling.constraint is not None


async def test_parse_gives_the_arguments_of_strict_tools(world: World) -> None:
    world.say('<tool_call>\n{"name": "Calculator", "arguments": {"a": 17, "b": 25, "op": "+"}}\n</tool_call>')
    async with world.sdk() as client:
        answer = await client.chat.completions.parse(**ASKED, tools=[openai.pydantic_function_tool(Calculator)])
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Calculator(a=17, b=25, op="+")


async def test_the_stream_helper_reports_text_calls_and_the_end(world: World) -> None:
    world.say(f"Sum:\n{CALL}")
    kinds: list[str] = []
    async with (
        world.sdk() as client,
        client.chat.completions.stream(**ASKED, tools=TOOLS, stream_options={"include_usage": True}) as events,
    ):
        async for event in events:
            kinds.append(event.type)
        final = await events.get_final_completion()
    assert {"content.delta", "content.done", "tool_calls.function.arguments.delta"} <= set(kinds)
    assert kinds.count("tool_calls.function.arguments.done") == kinds.count("content.done") == 1
    message = final.choices[0].message
    assert (message.content, final.choices[0].finish_reason) == ("Sum:", "tool_calls")
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 17, "b": 25, "op": "+"}
    assert final.usage is not None


async def test_the_stream_helper_puts_choices_and_log_probabilities_together(world: World) -> None:
    world.say("One.", "Two is longer.")
    async with (
        world.sdk() as client,
        client.chat.completions.stream(**ASKED, n=2, logprobs=True, top_logprobs=2) as events,
    ):
        final = await events.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["One.", "Two is longer."]
    for choice in final.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
        assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}


async def test_the_stream_helper_parses_the_clients_own_type(world: World) -> None:
    world.say('{"value": 42, "unit": "m"}')
    async with world.sdk() as client, client.chat.completions.stream(**ASKED, response_format=Result) as events:
        final = await events.get_final_completion()
    assert final.choices[0].message.parsed == Result(value=42, unit="m")


async def test_a_truncated_answer_is_the_sdks_own_error(world: World) -> None:
    world.say('{"value": 42, "unit": "metres"}')
    async with world.sdk() as client:
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(**ASKED, response_format=Result, max_completion_tokens=3)


async def test_raw_responses_have_the_headers_to_send_rewards_to(world: World) -> None:
    async with world.sdk() as client:
        raw = await client.chat.completions.with_raw_response.create(**ASKED)
        answer = raw.parse()
    assert raw.headers["x-base-rl-turn"] == answer.id
    assert raw.headers["x-base-rl-session"] == (await world.turns())[0].session_id


async def test_the_synchronous_sdk(world: World) -> None:
    async with world.sdk() as client:
        address = str(client.base_url)

        def ask() -> tuple[str | None, str]:
            with openai.OpenAI(api_key=world.key, base_url=address, max_retries=0) as sync:
                whole = sync.chat.completions.create(**ASKED)
                stream = sync.chat.completions.create(**ASKED, stream=True)
                return whole.choices[0].message.content, "".join(
                    chunk.choices[0].delta.content or "" for chunk in stream
                )

        assert await asyncio.to_thread(ask) == ("The answer is 42.", "The answer is 42.")


async def test_models_are_listed_and_found(world: World) -> None:
    async with world.sdk() as client:
        assert [model.id async for model in client.models.list()][:3] == ["policy", "policy@latest", "policy@0"]
        assert (await client.models.retrieve("policy@0")).owned_by == "base-rl"
        with pytest.raises(openai.NotFoundError, match="version 7"):
            await client.chat.completions.create(model="policy@7", messages=[USER])


async def test_old_completions_stream_with_log_probabilities(world: World) -> None:
    async with world.sdk() as client:
        stream: AsyncStream[Completion] = await client.completions.create(
            model="policy", prompt=["A:", "B:"], n=2, logprobs=2, stream=True, max_tokens=30
        )
        texts = [""] * 4
        tokens: list[list[str]] = [[], [], [], []]
        async for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
    assert texts == ["The answer is 42."] * 4
    assert ["".join(each) for each in tokens] == texts
