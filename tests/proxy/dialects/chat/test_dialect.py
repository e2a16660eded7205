"""Rules of the wire format of chat completions, one test each."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from proxy.contract.trajectory import Purpose
from tests.proxy.calls.world import CALL, TOOLS, USER, World, output_ids


async def chunks_of(world: World, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream without the closing [DONE]."""
    response = await world.post({"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2] if not event.startswith(":")]


async def test_a_whole_answer(world: World) -> None:
    response = await world.post({})
    answer = response.json()
    turn, session = (await world.turns())[0], (await world.sessions())[0]
    assert answer == {
        "id": turn.id,
        "object": "chat.completion",
        "created": int(world.store.clock()),
        "model": "policy",
        "system_fingerprint": "policy@0",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The answer is 42.", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": turn.prompt_token_count,
            "completion_tokens": len(output_ids(turn)),
            "total_tokens": turn.prompt_token_count + len(output_ids(turn)),
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert response.headers["x-base-rl-turn"] == turn.id
    assert response.headers["x-base-rl-session"] == session.id == turn.session_id


async def test_the_turn_is_what_was_sent_to_the_engine_and_came_from_it(world: World) -> None:
    await world.post({"temperature": 0.7, "top_p": 0.9, "seed": 3, "stop": ["x"], "max_tokens": 20})
    turn, request = (await world.turns())[0], world.engine.requests[0]
    rendered = world.template.render([USER], None, generation_prompt=True)
    assert request.input_ids == world.template.encode(rendered)
    assert output_ids(turn) == world.answers[0]
    assert turn.spans == [[0, 0, len(world.answers[0])]]
    assert turn.sampling["temperature"] == request.sampling.temperature == 0.7
    assert (request.sampling.top_p, request.sampling.seed, request.sampling.stop) == (0.9, 3, ("x",))
    assert request.sampling.max_new_tokens == 20
    assert turn.messages == [USER]
    assert turn.request["top_p"] == 0.9
    assert "messages" not in turn.request
    assert turn.response["turn_id"] == turn.id == request.request_id
    assert [attributed for _, attributed in world.seen.turns] == ["new"]
    assert world.seen.dialects == ["chat"]


async def test_seed_penalties_and_biases_reach_the_engine(world: World) -> None:
    asked = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "seed": -3, "logit_bias": {"5": -100, "6": 1.5},
    }  # fmt: skip
    await world.post(asked)
    given = msgspec.structs.asdict(world.engine.requests[0].sampling)
    assert {name: given[name] for name in asked} == asked
    turn = (await world.turns())[0]
    assert {name: turn.sampling[name] for name in asked} == asked


async def test_choices_are_never_null_and_finish_for_known_reasons(world: World) -> None:
    world.say("one", CALL)
    for body in ({"max_tokens": 1}, {}, {"tools": TOOLS}, {"stream_options": {"include_usage": True}}):
        chunks = await chunks_of(world, **body)
        assert all(isinstance(chunk["choices"], list) for chunk in chunks)
        reasons = {choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]}
        assert reasons - {None} <= {"stop", "length", "tool_calls"}


async def test_streaming_goes_token_by_token_and_ends_with_done(world: World) -> None:
    chunks = await chunks_of(world)
    text = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(text) == "The answer is 42."
    assert len([piece for piece in text if piece]) == len(world.answers[0]) - 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)


async def test_only_the_first_delta_has_the_role(world: World) -> None:
    chunks = await chunks_of(world)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in chunks[1:])


async def test_one_finish_reason_chunk(world: World) -> None:
    chunks = await chunks_of(world)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["system_fingerprint"] == "policy@0"


async def test_an_empty_answer_streams_whole(world: World) -> None:
    world.say("")
    chunks = await chunks_of(world)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]
    assert (await world.post({})).json()["choices"][0]["message"]["content"] == ""


async def test_usage_comes_only_when_asked_and_last(world: World) -> None:
    assert not any("usage" in chunk for chunk in await chunks_of(world))
    chunks = await chunks_of(world, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(world.answers[0])


async def test_tool_calls(world: World) -> None:
    world.say(f"Let me see.\n{CALL}\n{CALL}")
    choice = (await world.post({"tools": TOOLS})).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "calculator", "arguments": '{"a":  17, "b": 25, "op": "+"}'}
    ] * 2
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)


async def test_an_answer_of_calls_alone_has_null_content(world: World) -> None:
    world.say(CALL)
    assert (await world.post({"tools": TOOLS})).json()["choices"][0]["message"]["content"] is None


async def test_tool_call_deltas_have_the_name_once_and_always_an_index(world: World) -> None:
    world.say(f"{CALL}\n{CALL}")
    deltas = [chunk["choices"][0]["delta"] for chunk in await chunks_of(world, tools=TOOLS)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    for index in (0, 1):
        first, *rest = [call for call in calls if call["index"] == index]
        assert first["id"]
        assert first["type"] == "function"
        assert first["function"]["name"] == "calculator"
        assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
        arguments = "".join(call["function"]["arguments"] for call in (first, *rest))
        assert json.loads(arguments) == {"a": 17, "b": 25, "op": "+"}


async def test_a_malformed_call_is_text(world: World) -> None:
    world.say('<tool_call>\n{"name": "calculator", "arguments": {"a": 1\n</tool_call>')
    choice = (await world.post({"tools": TOOLS})).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("<tool_call>")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("body", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_nothing_is_parsed_or_offered(world: World, body: dict[str, Any]) -> None:
    world.say(CALL)
    assert (await world.post(body)).json()["choices"][0]["message"]["content"] == CALL
    assert "calculator" not in world.template.tokenizer.decode(list(world.engine.requests[0].input_ids))


async def test_without_parallel_calls_an_answer_has_one_call(world: World) -> None:
    world.say(CALL, stop=False)
    response = await world.post({"tools": TOOLS, "parallel_tool_calls": False, "stop": ["END"]})
    assert world.engine.requests[0].sampling.stop == ("END", "</tool_call>")
    assert len(response.json()["choices"][0]["message"]["tool_calls"]) == 1


async def test_custom_tools_are_ignored_with_a_warning(world: World) -> None:
    custom = {"type": "custom", "custom": {"name": "shell"}}
    response = await world.post({"tools": [custom, *TOOLS]})
    assert response.headers["x-base-rl-warning"] == "tools[0] of type custom is ignored"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_text_is_not_returned(world: World, stream: bool) -> None:
    world.say("one STOP", stop=False)
    if stream:
        chunks = await chunks_of(world, stop="STOP")
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        finish = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = (await world.post({"stop": ["STOP"]})).json()["choices"][0]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    assert (text, finish) == ("one ", "stop")
    assert output_ids((await world.turns())[0]) == world.answers[0], "what was generated is recorded whole"


async def test_max_tokens_far_above_the_context_are_clamped(world: World) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        assert (await world.post({name: 32_000})).status_code == 200
    prompt = len(world.engine.requests[0].input_ids)
    assert {request.sampling.max_new_tokens for request in world.engine.requests} == {512 - prompt}


async def test_a_truncated_answer_has_finish_reason_length(world: World) -> None:
    choice = (await world.post({"max_completion_tokens": 3})).json()["choices"][0]
    assert choice["finish_reason"] == "length"


async def test_a_prompt_beyond_the_context_is_refused(world: World) -> None:
    response = await world.post({"messages": [{"role": "user", "content": "日" * 600}]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["param"] == "messages"


async def test_logprobs_are_those_of_the_shown_tokens(world: World) -> None:
    world.say("é 42")
    content = (await world.post({"logprobs": True, "top_logprobs": 0})).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "é 42".encode()
    assert {entry["logprob"] for entry in content} == {-0.5}
    assert all(entry["top_logprobs"] == [] for entry in content)
    chunks = await chunks_of(world, logprobs=True)
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_top_logprobs_are_the_most_probable_in_each_place(world: World) -> None:
    world.say("42")
    asked = {"logprobs": True, "top_logprobs": 2}
    content = (await world.post(asked)).json()["choices"][0]["logprobs"]["content"]
    assert {request.top_logprobs for request in world.engine.requests} == {2}
    for entry in content:
        best, second = entry["top_logprobs"]
        assert best == {"token": entry["token"], "logprob": entry["logprob"], "bytes": entry["bytes"]}
        assert second["logprob"] == -1.5
        assert bytes(second["bytes"]).decode(errors="replace") == second["token"] != best["token"]
    chunks = await chunks_of(world, **asked)
    streamed = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_a_seed_that_the_engine_ignores_causes_a_warning(world: World) -> None:
    assert "x-base-rl-warning" not in (await world.post({"seed": 3})).headers
    world.engine.seeded = False
    response = await world.post({"seed": 3})
    assert response.headers["x-base-rl-warning"].startswith("seed has no effect")
    assert [request.sampling.seed for request in world.engine.requests] == [3, None]
    assert [turn.sampling.get("seed") for turn in await world.turns()] == [3, None]
    assert "x-base-rl-warning" not in (await world.post({})).headers


async def test_explicit_null_is_absent_for_every_optional_field(world: World) -> None:
    names = [
        "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "response_format", "n",
        "max_completion_tokens", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "seed", "stop", "logit_bias", "logprobs", "top_logprobs", "stream", "stream_options",
        "user", "metadata", "store", "service_tier", "reasoning_effort", "verbosity", "prediction", "modalities",
        "audio", "web_search_options", "chat_template_kwargs", "prompt_cache_key", "safety_identifier",
    ]  # fmt: skip
    message = {"role": "user", "content": "x", "name": None, "tool_calls": None, "refusal": None}
    assert (await world.post({**dict.fromkeys(names), "messages": [message]})).status_code == 200


async def test_unknown_fields_are_ignored(world: World) -> None:
    body = {"x_vendor": {"deep": [1]}, "messages": [{**USER, "x_other": True}], "stream_options": {"x": 1}}
    assert (await world.post(body)).status_code == 200


async def test_a_constraint_that_cannot_be_enforced_is_refused(world: World) -> None:
    world.engine.grammar_backend = "none"
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    for body, param in (
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [strict]}, "tools"),
        ({"response_format": {"type": "json_object"}, "stream": True}, "response_format"),
    ):
        response = await world.post(body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert response.json()["error"]["code"] == "unsupported_parameter"
    assert await world.turns() == []


async def test_content_as_parts_in_every_role(world: World) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [*parts, {"type": "refusal", "refusal": "no"}], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
    ]
    assert (await world.post({"messages": messages})).status_code == 200
    rendered = world.template.tokenizer.decode(list(world.engine.requests[0].input_ids), skip_special_tokens=False)
    assert rendered.startswith("<|im_start|>system\nab<|im_end|>\n<|im_start|>user\nab<|im_end|>\n")
    assert "<tool_response>\nab\n</tool_response>" in rendered


async def test_the_official_sdk_reads_answers_and_streams(world: World) -> None:
    world.say(f"Sum:\n{CALL}")
    async with world.sdk() as client:
        whole = await client.chat.completions.create(model="policy", messages=[USER], tools=TOOLS)
        assert whole.choices[0].message.tool_calls is not None
        stream = await client.chat.completions.create(
            model="policy",
            messages=[USER],
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        async with client.chat.completions.stream(model="policy", messages=[USER], tools=TOOLS) as events:
            final = await events.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Sum:"
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 17, "b": 25, "op": "+"}
    assert final.system_fingerprint == "policy@0"


async def test_every_path_serves(world: World) -> None:
    session, key = await world.session_key()
    for path in ("/chat/completions", "/v1/chat/completions", f"/sessions/{session}/v1/chat/completions",
                 f"/sessions/{session}/chat/completions"):  # fmt: skip
        assert (await world.post({}, path, authorization=f"Bearer {key}")).status_code == 200
    assert {turn.session_id for turn in await world.turns()} == {session}
    assert (await world.post({}, "/sessions/my-own-name/v1/chat/completions")).status_code == 200


async def test_a_key_in_x_api_key(world: World) -> None:
    assert (await world.post({}, authorization="", x_api_key=world.key)).status_code == 200


@pytest.mark.parametrize("key", ["", "Bearer wrong"])
async def test_no_key_and_a_wrong_one_are_401(world: World, key: str) -> None:
    response = await world.post({}, authorization=key)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


async def test_a_session_key_on_another_session_is_403(world: World) -> None:
    _, key = await world.session_key()
    response = await world.post({}, "/sessions/other/v1/chat/completions", authorization=f"Bearer {key}")
    assert response.status_code == 403
    assert await world.turns() == []


async def test_the_sdk_raises_its_own_errors(world: World) -> None:
    async with world.sdk() as client:
        with pytest.raises(openai.NotFoundError, match="nope"):
            await client.chat.completions.create(model="nope", messages=[USER])
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=[])
        assert caught.value.param == "messages"


async def test_evaluation_sessions_are_sampled_as_asked(world: World) -> None:
    keys = [(await world.session_key(purpose=purpose.value))[1] for purpose in (Purpose.EVAL, Purpose.TRAIN)]
    for key in keys:
        await world.post({"temperature": 0}, authorization=f"Bearer {key}")
    assert [request.sampling.temperature for request in world.engine.requests] == [0.0, 1.0]
