"""The deprecated form of tools: `functions`, `function_call` and role `function`."""

from __future__ import annotations

import json
from typing import Any

from tests.proxy.calls.world import CALL, TOOLS, USER, World

FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]
ARGUMENTS = '{"a":  17, "b": 25, "op": "+"}'


async def test_functions_are_offered_as_tools(world: World) -> None:
    await world.post({"functions": FUNCTIONS})
    await world.post({"tools": TOOLS})
    assert world.engine.requests[0].input_ids == world.engine.requests[1].input_ids


async def test_a_call_is_answered_in_the_deprecated_form(world: World) -> None:
    world.say(f"Sum:\n{CALL}")
    choice = (await world.post({"functions": FUNCTIONS, "function_call": "auto"})).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Sum:",
        "refusal": None,
        "annotations": [],
        "function_call": {"name": "calculator", "arguments": ARGUMENTS},
    }


async def test_the_answer_ends_with_the_first_call(world: World) -> None:
    await world.post({"functions": FUNCTIONS})
    assert "</tool_call>" in world.engine.requests[0].sampling.stop


async def test_a_call_is_streamed_in_the_deprecated_form(world: World) -> None:
    world.say(CALL)
    response = await world.post({"functions": FUNCTIONS, "stream": True})
    choices = [json.loads(e.removeprefix("data: "))["choices"][0] for e in response.text.split("\n\n")[:-2]]
    calls = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert [call.get("name") for call in calls] == ["calculator", None]
    assert "".join(call["arguments"] for call in calls) == ARGUMENTS
    assert choices[-1]["finish_reason"] == "function_call"
    assert not any("tool_calls" in choice["delta"] for choice in choices)


async def test_the_conversation_continues_from_the_recorded_ids(world: World) -> None:
    world.say(CALL, "42")
    said = (await world.post({"functions": FUNCTIONS})).json()["choices"][0]["message"]
    result = {"role": "function", "name": "calculator", "content": "42"}
    await world.post({"functions": FUNCTIONS, "messages": [USER, said, result]})
    first, second = await world.turns()
    assert (second.session_id, second.parent_id, second.continuation) == (first.session_id, first.id, "exact")


async def test_the_sdk_reads_the_deprecated_form(world: World) -> None:
    world.say(CALL)
    async with world.sdk() as client:
        answer = await client.chat.completions.create(model="policy", messages=[USER], functions=FUNCTIONS)
    assert answer.choices[0].message.function_call is not None
    assert json.loads(answer.choices[0].message.function_call.arguments) == {"a": 17, "b": 25, "op": "+"}
