"""Anthropic's Messages API: whole and streamed answers."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import anthropic
import msgspec
import pytest

from proxy.calls.call import Answer, CallDelta, Choice, ModelCall, RequestedSampling
from proxy.contract.identifiers import new_session_id, new_turn_id
from proxy.contract.turn import FinishReason
from proxy.dialects.messages.dialect import Messages
from proxy.dialects.streaming import head_of, whole_stream
from proxy.tokens.formats import ToolCall
from tests.proxy.calls.world import CALL, USER, World, output_ids
from tests.proxy.dialects.messages.anthropic_client import ASKED, TOOL, answer, ask, events, read_events, sdk

UNUSED = {
    "cache_creation": None,
    "inference_geo": None,
    "output_tokens_details": None,
    "server_tool_use": None,
    "service_tier": "standard",
}


async def test_a_whole_answer(world: World) -> None:
    response = await ask(world)
    turn, session = (await world.turns())[0], (await world.sessions())[0]
    assert response.json() == {
        "id": turn.id,
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "container": None,
        "content": [{"type": "text", "text": "The answer is 42.", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            **UNUSED,
            "input_tokens": turn.prompt_token_count,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(output_ids(turn)),
        },
    }
    assert response.headers["x-base-rl-turn"] == turn.id
    assert response.headers["x-base-rl-session"] == session.id == turn.session_id
    assert world.seen.dialects == ["messages"]


async def test_the_turn_is_what_was_sent_to_the_engine_and_came_from_it(world: World) -> None:
    await ask(world, system="Be brief.", temperature=0.7, top_p=0.9, top_k=5, stop_sequences=["x"], max_tokens=20)
    turn, request = (await world.turns())[0], world.engine.requests[0]
    said = [{"role": "system", "content": "Be brief."}, USER]
    assert request.input_ids == world.template.encode(world.template.render(said, None, generation_prompt=True))
    assert output_ids(turn) == world.answers[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.7, 0.9, 5, ("x",))
    assert sampling.max_new_tokens == 20
    assert turn.messages == said
    assert turn.request["top_p"] == 0.9
    assert not {"messages", "system"} & set(turn.request)


async def test_the_answer_has_the_fields_of_the_sdks_model(world: World) -> None:
    world.say(f"Let me see.\n{CALL}")
    await answer(world)
    await answer(world, tools=[TOOL])


async def test_a_stream_begins_fills_blocks_and_ends(world: World) -> None:
    written = await events(world)
    turn = (await world.turns())[0]
    assert written[0] == {
        "type": "message_start",
        "message": {
            "id": turn.id,
            "type": "message",
            "role": "assistant",
            "model": "policy",
            "container": None,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {
                **UNUSED,
                "input_tokens": turn.prompt_token_count,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        },
    }
    block = {"type": "text", "text": "", "citations": None}
    assert written[1] == {"type": "content_block_start", "index": 0, "content_block": block}
    assert written[-3:] == [
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None, "stop_details": None},
            "usage": {
                "input_tokens": turn.prompt_token_count,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": len(output_ids(turn)),
            },
        },
        {"type": "message_stop"},
    ]
    assert {event["type"] for event in written[2:-3]} == {"content_block_delta"}
    texts = [event["delta"]["text"] for event in written[2:-3]]
    assert "".join(texts) == "The answer is 42."
    assert len(texts) == len(world.answers[0]) - 1, "token by token"


async def test_tool_use_has_its_input_parsed(world: World) -> None:
    world.say(f"Let me see.\n{CALL}\n{CALL}")
    message = await answer(world, tools=[TOOL])
    assert message["stop_reason"] == "tool_use"
    assert message["content"][0] == {"type": "text", "text": "Let me see.", "citations": None}
    uses = message["content"][1:]
    assert [(use["type"], use["name"], use["input"], use["caller"]) for use in uses] == [
        ("tool_use", "calculator", {"a": 17, "b": 25, "op": "+"}, {"type": "direct"})
    ] * 2
    assert len({use["id"] for use in uses}) == 2


async def test_an_answer_of_calls_alone_has_no_text_block(world: World) -> None:
    world.say(CALL)
    assert [block["type"] for block in (await answer(world, tools=[TOOL]))["content"]] == ["tool_use"]


async def test_an_empty_answer_has_no_blocks(world: World) -> None:
    world.say("")
    message = await answer(world)
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")
    assert [event["type"] for event in await events(world)] == ["message_start", "message_delta", "message_stop"]


async def test_streamed_blocks_follow_each_other_and_inputs_come_as_json_text(world: World) -> None:
    world.say(f"Sum:\n{CALL}\n{CALL}")
    written = await events(world, tools=[TOOL])
    blocks = [event for event in written if event["type"].startswith("content_block")]
    assert [event["index"] for event in blocks] == sorted(event["index"] for event in blocks)
    for index in range(3):
        kinds = [event["type"].removeprefix("content_block_") for event in blocks if event["index"] == index]
        assert (kinds[0], kinds[-1]) == ("start", "stop")
        assert set(kinds[1:-1]) == {"delta"}
    starts = [event["content_block"] for event in blocks if event["type"] == "content_block_start"]
    assert [(start["type"], start.get("input")) for start in starts] == [
        ("text", None),
        ("tool_use", {}),
        ("tool_use", {}),
    ]
    for index in (1, 2):
        pieces = [event["delta"] for event in blocks if event["index"] == index and "delta" in event]
        assert {piece["type"] for piece in pieces} == {"input_json_delta"}
        arguments = "".join(piece["partial_json"] for piece in pieces)
        assert json.loads(arguments) == {"a": 17, "b": 25, "op": "+"}
    assert written[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None}


async def test_text_after_a_call_is_a_block_of_its_own_in_a_stream(world: World) -> None:
    world.say(f"One.\n{CALL}\nTwo.")
    starts = [event for event in await events(world, tools=[TOOL]) if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["text", "tool_use", "text"]
    assert [start["index"] for start in starts] == [0, 1, 2]


async def test_a_malformed_call_is_text(world: World) -> None:
    world.say('<tool_call>\n{"name": "calculator", "arguments": {"a": 1\n</tool_call>')
    message = await answer(world, tools=[TOOL])
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_matched_stop_sequence_is_named_and_not_returned(world: World, stream: bool) -> None:
    world.say("one STOP", stop=False)
    asked = {"stop_sequences": ["HALT", "STOP"]}
    if stream:
        written = await events(world, **asked)
        text = "".join(event["delta"].get("text", "") for event in written if event["type"] == "content_block_delta")
        ending = written[-2]["delta"]
    else:
        message = await answer(world, **asked)
        text = message["content"][0]["text"]
        ending = {key: message[key] for key in ("stop_reason", "stop_sequence", "stop_details")}
    assert text == "one "
    assert ending == {"stop_reason": "stop_sequence", "stop_sequence": "STOP", "stop_details": None}
    assert output_ids((await world.turns())[0]) == world.answers[0], "what was generated is recorded whole"


async def test_an_answer_that_ends_by_itself_names_no_stop_sequence(world: World) -> None:
    message = await answer(world, stop_sequences=["STOP"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


async def test_calls_before_a_stop_sequence_decide_the_stop_reason(world: World) -> None:
    world.say(f"{CALL}\nthen STOP", stop=False)
    message = await answer(world, tools=[TOOL], stop_sequences=["STOP"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


async def test_max_tokens_truncates_and_is_clamped(world: World) -> None:
    assert (await answer(world, max_tokens=3))["stop_reason"] == "max_tokens"
    await answer(world, max_tokens=128_000)
    assert world.engine.requests[1].sampling.max_new_tokens == 512 - len(world.engine.requests[1].input_ids)


async def test_the_reused_prompt_counts_as_read_from_the_cache(world: World) -> None:
    first = await answer(world)
    said = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Sure?"}]
    usage = (await answer(world, messages=said))["usage"]
    turn = (await world.turns())[1]
    assert usage["cache_read_input_tokens"] == turn.prefix_tokens > 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == turn.prompt_token_count


async def test_disable_parallel_tool_use_ends_the_answer_after_the_first_call(world: World) -> None:
    world.say(CALL, stop=False)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await answer(world, tools=[TOOL], tool_choice=choice)
    assert world.engine.requests[0].sampling.stop == ("</tool_call>",)
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("body", [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": {"type": "none"}}])
async def test_without_tools_nothing_is_parsed_or_offered(world: World, body: dict[str, Any]) -> None:
    world.say(CALL)
    assert (await answer(world, **body))["content"] == [{"type": "text", "text": CALL, "citations": None}]
    assert "calculator" not in world.template.tokenizer.decode(list(world.engine.requests[0].input_ids))


async def test_every_path_serves_and_query_and_beta_headers_do_not_matter(world: World) -> None:
    session, key = await world.session_key()
    headers = {"authorization": f"Bearer {key}", "anthropic-beta": "context-1m-2025-08-07"}
    for prefix in ("", "/v1", f"/sessions/{session}/v1", f"/sessions/{session}"):
        assert (await ask(world, f"{prefix}/messages?beta=true", headers)).status_code == 200
        assert (await ask(world, f"{prefix}/messages/count_tokens?beta=true", headers)).status_code == 200
    assert {turn.session_id for turn in await world.turns()} == {session}


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_a_key_in_either_header(world: World, header: str) -> None:
    key = world.key if header == "x-api-key" else f"Bearer {world.key}"
    assert (await ask(world, headers={"authorization": "", header: key})).status_code == 200


async def test_the_request_id_is_in_the_header_that_the_sdk_reads(world: World) -> None:
    world.app.add_middleware(RequestId)
    async with sdk(world) as client:
        message = await client.messages.create(**ASKED)
        assert message._request_id == "req_1"  # public, despite its name: the SDK documents it
        async with client.messages.stream(**ASKED) as stream:
            await stream.until_done()
            assert stream.request_id == "req_1"
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(**{**ASKED, "model": "nope"})
        assert caught.value.request_id == "req_1"


class RequestId:
    """Stand-in for RequestBoundary: sets the request's id."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope.setdefault("state", {})["request_id"] = "req_1"
        await self._app(scope, receive, send)


async def test_the_sdk_reads_answers_and_streams(world: World) -> None:
    world.say(f"Sum:\n{CALL}")
    async with sdk(world) as client:
        whole = await client.messages.create(**ASKED, tools=[TOOL])
        raw = await client.messages.create(**ASKED, tools=[TOOL], stream=True)
        kinds = [event.type async for event in raw]
        async with client.messages.stream(**ASKED, tools=[TOOL]) as stream:
            written = [event.type async for event in stream]
            final = await stream.get_final_message()
        beta = await client.beta.messages.create(
            **ASKED, tools=[TOOL], betas=["fine-grained-tool-streaming-2025-05-14"]
        )
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert {"text", "input_json"} <= set(written)
    answers: list[Any] = [whole, final, beta]
    for message in answers:
        assert message.stop_reason == "tool_use"
        text, use = message.content
        assert text.type == "text"
        assert text.text == "Sum:"
        assert use.type == "tool_use"
        assert use.input == {"a": 17, "b": 25, "op": "+"}
    assert final.usage.output_tokens == len(world.answers[0])


async def test_a_tool_loop_with_the_sdks_own_echo_is_one_exact_conversation(world: World) -> None:
    """The assistant's content is sent back as the SDK's own objects, after streamed and whole answers in turn."""
    world.say(f"I add.\n{CALL}\n{CALL}", f"Once more.\n{CALL}", "It is 84.", "Yes.")
    messages: list[Any] = [USER]
    async with sdk(world) as client:
        for number in range(4):
            if number % 2:
                async with client.messages.stream(**{**ASKED, "messages": messages}, tools=[TOOL]) as stream:
                    message: Any = await stream.get_final_message()
            else:
                message = await client.messages.create(**{**ASKED, "messages": messages}, tools=[TOOL])
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "42"}]}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results or "Sure?"})
    turns = await world.turns()
    assert [turn.continuation for turn in turns] == ["new", "exact", "exact", "exact"]
    assert len({turn.session_id for turn in turns}) == 1
    for (before, after), (first, second) in zip(pairwise(world.engine.requests), pairwise(turns), strict=True):
        path = before.input_ids + tuple(output_ids(first))
        assert after.input_ids[: len(path)] == path
        assert second.prefix_tokens == len(path)
        assert second.parent_id == first.id
    last = world.template.tokenizer.decode(list(world.engine.requests[-1].input_ids), skip_special_tokens=False)
    assert last.count("<tool_response>\n42\n</tool_response>") == 3


async def test_an_echo_with_one_message_for_each_block_is_the_same_conversation(world: World) -> None:
    world.say(f"I add.\n{CALL}\n{CALL}", "It is 42.")
    content = (await answer(world, tools=[TOOL]))["content"]
    echo = [{"role": "assistant", "content": [block]} for block in content]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "42"} for block in content[1:]]
    await ask(world, tools=[TOOL], messages=[USER, *echo, *({"role": "user", "content": [r]} for r in results)])
    assert [turn.continuation for turn in await world.turns()] == ["new", "exact"]


async def test_a_prefill_is_continued_and_its_echo_recognised(world: World) -> None:
    world.say(" is 42.", "Yes.")
    begun = {"role": "assistant", "content": "The answer"}
    message = await answer(world, messages=[USER, begun])
    assert message["content"] == [{"type": "text", "text": " is 42.", "citations": None}]
    rendered = world.template.render([USER], None, generation_prompt=True)
    assert world.engine.requests[0].input_ids == world.template.encode(rendered + "The answer")
    whole = {"role": "assistant", "content": "The answer is 42."}
    pieces = {"role": "assistant", "content": message["content"]}
    more = {"role": "user", "content": "Sure?"}
    await ask(world, messages=[USER, whole, more])
    await ask(world, messages=[USER, begun, pieces, more])
    await ask(world, messages=[USER, pieces, more])
    turns = await world.turns()
    assert [turn.continuation for turn in turns[:3]] == ["new", "exact", "exact"]
    assert turns[3].continuation != "exact", "what was said is not what is echoed"
    assert turns[0].messages == [USER, begun]


async def test_a_prefill_after_a_recorded_turn_preserves_the_turns_tokens(world: World) -> None:
    first = await answer(world)
    said = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Sure?"}]
    await ask(world, messages=[*said, {"role": "assistant", "content": "Yes, I"}])
    before, after = world.engine.requests
    path = before.input_ids + tuple(world.answers[0])
    assert after.input_ids[: len(path)] == path
    assert world.template.tokenizer.decode(list(after.input_ids)).endswith("assistant\nYes, I")


# The writer alone: how a model's parser reports thoughts


def thoughtful() -> Answer:
    call = ToolCall(index=0, name="f", arguments='{"x": 1.0}')
    choice = Choice(
        turn_id=new_turn_id(),
        text="So:",
        reasoning="Hm. Yes.",
        tool_calls=(CallDelta("call_1", call),),
        finish_reason=FinishReason.TOOL_CALLS,
        completion_tokens=9,
    )
    return Answer(
        turn_id=choice.turn_id,
        session_id=new_session_id(),
        model="policy",
        run_name="policy",
        created=1,
        prompt_tokens=7,
        cached_tokens=3,
        choices=(choice,),
    )


def call_with(**body: Any) -> ModelCall:
    return ModelCall(model="policy", messages=[], sampling=RequestedSampling(), body=body)


def blocks_of(stream: bytes) -> list[dict[str, Any]]:
    """Return the content blocks that a client builds from a stream."""
    blocks: list[dict[str, Any]] = []
    for event in read_events(stream.decode()):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            key = delta["type"].removesuffix("_delta")
            if key == "input_json":
                blocks[-1]["input"] = json.loads(delta["partial_json"])
            else:
                blocks[-1][key] += delta[key]
    return blocks


@pytest.mark.parametrize(("display", "shown"), [(None, "Hm. Yes."), ("summarized", "Hm. Yes."), ("omitted", "")])
def test_thinking_comes_first_and_has_the_same_signature_whole_and_streamed(display: str | None, shown: str) -> None:
    made, asked = thoughtful(), call_with(thinking={"type": "adaptive", "display": display})
    whole = msgspec.json.decode(msgspec.json.encode(Messages().response(asked, made)))
    thought, text, use = whole["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", shown)
    assert thought["signature"]
    assert (text["text"], use["input"]) == ("So:", {"x": 1.0})
    assert blocks_of(whole_stream(Messages().stream(asked, head_of(made)), made)) == whole["content"]


def test_the_signature_comes_last_in_its_block() -> None:
    made = thoughtful()
    written = read_events(whole_stream(Messages().stream(call_with(), head_of(made)), made).decode())
    first = [event for event in written if event.get("index") == 0]
    assert [event.get("delta", {}).get("type") for event in first] == [
        None,
        "thinking_delta",
        "signature_delta",
        None,
    ]


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use"), ("content_filter", "refusal")],
)
def test_every_finish_reason_has_a_stop_reason(finish: str, reason: str) -> None:
    made = thoughtful()
    choice = msgspec.structs.replace(made.choices[0], finish_reason=FinishReason(finish))
    written = Messages().response(call_with(), msgspec.structs.replace(made, choices=(choice,)))
    assert written["stop_reason"] == reason
