"""Streams of the Responses API, with events validated by the SDK's models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseReasoningItem,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter

from proxy.calls.call import Answer, CallDelta, Choice, Delta, ModelCall, ReasoningDelta, RequestedSampling, TextDelta
from proxy.contract.identifiers import SessionId, TurnId
from proxy.contract.turn import FinishReason
from proxy.dialects.responses.dialect import Responses
from proxy.dialects.streaming import head_of, whole_stream
from proxy.errors import EngineFailed
from proxy.tokens.formats import ToolCall
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.world import CALL, World, listening, open_world, until
from tests.running_app import bearer

QUESTION = "What is 17 + 25?"
CALCULATOR: Any = {"type": "function", "name": "calculator", "parameters": {"type": "object"}}
PATCH: Any = {"type": "custom", "name": "patch"}
STREAMED = {"model": "policy", "input": QUESTION, "stream": True}
TURN = TurnId("turn_01m7zrzm1dq96rr5zq53070bmm")

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, after validation by the SDK's models. Their numbers count from 0."""
    events = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        _EVENT.validate_python(event)
        events.append(event)
    assert text.endswith("\n\n")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def events_of(world: World, headers: dict[str, str] | None = None, **body: Any) -> list[dict[str, Any]]:
    response = await world.http.post("/v1/responses", json={**STREAMED, **body}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_in(response.text)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, with consecutive repetitions removed."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


def written(*deltas: Delta, finish: FinishReason = FinishReason.STOP, tools: list[Any] | None = None) -> list[Any]:
    """Return the events of an answer that is generated in these pieces and recorded whole."""
    calls = tuple(delta for delta in deltas if isinstance(delta, CallDelta))
    choice = Choice(
        turn_id=TURN,
        text="".join(delta.text for delta in deltas if isinstance(delta, TextDelta)),
        reasoning="".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        tool_calls=calls,
        finish_reason=finish,
        completion_tokens=3,
        version=1,
    )
    answer = Answer(
        turn_id=TURN,
        session_id=SessionId("ses"),
        model="policy",
        run_name="policy",
        created=1,
        prompt_tokens=2,
        cached_tokens=1,
        choices=(choice,),
    )
    call = ModelCall(
        model="policy", messages=[], sampling=RequestedSampling(), body={"model": "policy", "tools": tools or []}
    )
    writer = Responses().stream(call, head_of(answer))
    text = writer.opening() + b"".join(map(writer.delta, deltas)) + writer.closing(answer)
    events = events_in(text.decode())
    Response.model_validate(Responses().response(call, answer))
    assert events_in(whole_stream(Responses().stream(call, head_of(answer)), answer).decode())
    return events


def call_delta(index: int = 0, name: str = "calculator", arguments: str = "{}") -> CallDelta:
    return CallDelta(f"call_{index}", ToolCall(index=index, name=name, arguments=arguments))


# Their order


async def test_the_events_of_text(world: World) -> None:
    events = await events_of(world)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert len(deltas) > 1, "token by token"
    assert "".join(deltas) == "The answer is 42."


async def test_the_first_and_the_last_event_contain_the_response(world: World) -> None:
    events = await events_of(world, metadata={"a": "b"})
    (turn,) = await world.turns()
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["id"], first["status"], first["output"], first["usage"]) == (turn.id, "in_progress", [], None)
    assert last == (await world.http.get(f"/v1/responses/{turn.id}")).json()
    assert last["usage"]["output_tokens"] == len(world.answers[0])
    assert last["metadata"] == {"a": "b"}


async def test_the_turn_is_recorded_before_the_last_event(world: World) -> None:
    async with world.sdk() as client:
        stream = await client.responses.create(model="policy", input=QUESTION, stream=True)
        async for event in stream:
            if isinstance(event, ResponseCompletedEvent):
                assert len(await world.turns()) == 1
                break


async def test_the_events_of_calls(world: World) -> None:
    world.say(f"I compute.\n{CALL}\n{CALL}")
    events = await events_of(world, tools=[CALCULATOR])
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds(events)[-9:] == [*call, *call, "completed"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1, 2]
    assert [event["item"] for event in done] == events[-1]["response"]["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [event["item"]["id"] for event in done]
    assert [item.get("arguments") for item in added] == [None, "", ""]


def test_the_events_of_reasoning() -> None:
    events = written(ReasoningDelta("Hm"), ReasoningDelta("m."), TextDelta("42"), call_delta())
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    thought, message, call = events[-1]["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert (message["content"][0]["text"], call["name"]) == ("42", "calculator")
    ResponseReasoningItem.model_validate(thought)


def test_the_events_of_custom_calls() -> None:
    events = written(call_delta(name="patch", arguments='{"input": "a\\nb"}'), tools=[PATCH])
    assert kinds(events)[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert events[2]["item"]["input"] == ""
    assert events[4]["input"] == "a\nb"


def test_pieces_may_come_in_any_order_and_items_stay_apart() -> None:
    pieces: list[Delta] = [
        TextDelta("a"),
        ReasoningDelta("b"),
        TextDelta("c"),
        call_delta(0),
        TextDelta("d"),
        call_delta(1),
        ReasoningDelta("e"),
    ]
    events = written(*pieces)
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "message",
        "function_call",
        "reasoning",
    ]
    assert len({item["id"] for item in output}) == len(output)
    opened = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert opened == list(range(len(output)))


def test_an_empty_answer_has_an_empty_message() -> None:
    events = written()
    assert kinds(events)[2:-1] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_a_truncated_answer_ends_as_incomplete(world: World) -> None:
    last = (await events_of(world, max_output_tokens=2))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][-1]["status"] == "incomplete"


async def test_logprobs_come_with_their_text(world: World) -> None:
    events = await events_of(world, include=["message.output_text.logprobs"])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    for event in deltas:
        assert "".join(entry["token"] for entry in event["logprobs"]) == event["delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == [entry for event in deltas for entry in event["logprobs"]]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == done["logprobs"]
    assert not any(event.get("logprobs") for event in await events_of(world))


# As the SDK reads them


async def test_the_sdks_stream(world: World) -> None:
    world.say(f"I compute.\n{CALL}")
    async with (
        world.sdk() as client,
        client.responses.stream(model="policy", input=QUESTION, tools=[CALCULATOR]) as stream,
    ):
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text == "I compute."
    assert final.output[1].type == "function_call"


async def test_an_error_in_mid_stream_is_raised_by_the_sdk(world: World) -> None:
    world.engine.error, world.engine.error_after = EngineFailed("the engine broke"), 3
    seen: list[str] = []
    async with world.sdk() as client:
        stream = await client.responses.create(model="policy", input=QUESTION, stream=True)

        async def read() -> None:
            async for event in stream:
                seen.append(event.type)

        with pytest.raises(openai.APIError, match="the engine broke"):
            await read()
    assert "response.output_text.delta" in seen


async def test_an_error_in_mid_stream_is_an_event_and_the_end_of_the_response(world: World) -> None:
    world.engine.error, world.engine.error_after = EngineFailed("the engine broke"), 3
    *_, error, failed = await events_of(world)
    assert (error["type"], error["code"], error["message"]) == ("error", "engine_failed", "the engine broke")
    assert error["error"]["type"] == "upstream_error"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine broke"}
    (turn,) = await world.turns()
    assert (turn.id, turn.state) == (failed["response"]["id"], "failed")


async def test_an_error_before_the_stream_has_its_status(world: World) -> None:
    world.engine.error = EngineFailed("the engine broke")
    response = await world.http.post("/v1/responses", json=STREAMED)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_failed")


# Wire rules


async def test_pings_keep_a_long_stream_alive(tmp_path: Path, template: ChatTemplate) -> None:
    async with open_world(tmp_path, template, ping_seconds=0.01) as world:
        world.engine.gate.clear()
        lines: list[str] = []
        async with (
            listening(world.app) as address,
            httpx.AsyncClient(headers=bearer(world.key)) as client,
            client.stream("POST", f"{address}/v1/responses", json=STREAMED) as response,
        ):
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": ping") == 2:
                    world.engine.gate.set()
        assert lines.count(": ping") >= 2
        assert "event: response.completed" in lines


async def test_a_client_that_leaves_ends_the_generation_and_the_turn_is_recorded(world: World) -> None:
    world.engine.gate.clear()
    async with listening(world.app) as address, httpx.AsyncClient(headers=bearer(world.key)) as client:
        call = asyncio.create_task(client.post(f"{address}/v1/responses", json=STREAMED))
        await world.engine.held.wait()
        call.cancel()
        await until(lambda: bool(world.engine.aborted) and not world.calls.running)
    (turn,) = await world.turns()
    assert turn.state == "truncated"
    world.engine.gate.set()
    assert (await world.http.get(f"/v1/responses/{turn.id}")).json()["status"] == "incomplete"
    await events_of(world, previous_response_id=turn.id, input="Go on.")
    assert [row.continuation for row in await world.turns()] == ["new", "exact"]


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}])
async def test_a_retry_is_answered_once_with_the_same_items(world: World, headers: dict[str, str]) -> None:
    world.say(f"I compute.\n{CALL}")
    named = {"x-base-rl-session": "job"}
    first = await events_of(world, {**named, "x-stainless-retry-count": "0", **headers}, tools=[CALCULATOR])
    again = await events_of(world, {**named, **headers}, tools=[CALCULATOR])
    assert again[-1]["response"] == first[-1]["response"]
    assert kinds(again) == kinds(first)
    assert len(await world.turns()) == 1
