"""count_tokens: the exact number of tokens in a call's prompt, without generating or recording."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import pytest

from tests.proxy.calls.world import USER, World
from tests.proxy.dialects.messages.anthropic_client import ASKED, TOOL, ask, sdk

COUNT = "/v1/messages/count_tokens"
RESULT: Any = {"type": "tool_result", "tool_use_id": "c", "content": "42"}
USE: Any = {"type": "tool_use", "id": "c", "name": "calculator", "input": {"a": 1}}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"system": "Be brief."},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"messages": [USER, {"role": "assistant", "content": "The answer"}]},
        {
            "tools": [TOOL],
            "messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}],
        },
    ],
)
async def test_the_count_equals_the_prompt_tokens_of_the_call(world: World, body: dict[str, Any]) -> None:
    counted = (await ask(world, COUNT, **body)).json()
    assert world.engine.requests == []
    assert await world.turns() == await world.sessions() == []
    await ask(world, **body)
    assert counted == {"input_tokens": len(world.engine.requests[0].input_ids)}


async def test_the_sdk_counts(world: World) -> None:
    async with sdk(world) as client:
        counted = await client.messages.count_tokens(model="policy", messages=[USER], tools=[TOOL])
        beta = await client.beta.messages.count_tokens(model="policy", messages=[USER], tools=[TOOL])
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="nope", messages=[USER])
    assert counted.input_tokens == beta.input_tokens > 0


async def test_a_prompt_beyond_the_context_is_counted(world: World) -> None:
    long = {"role": "user", "content": "日" * 600}
    assert (await ask(world, COUNT, messages=[long])).json()["input_tokens"] > 600
    refused = await ask(world, messages=[long])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert re.fullmatch(r"prompt is too long: \d+ tokens > 512 maximum", refused.json()["error"]["message"])


async def test_counting_refuses_bodies_and_keys_like_a_call(world: World) -> None:
    assert (await ask(world, COUNT, messages=[{"role": "user"}])).json()["error"]["param"] == "messages[0].content"
    refused = await ask(world, COUNT, {"authorization": "Bearer wrong"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert (await ask(world, COUNT, **{**ASKED, "model": None})).status_code == 400
