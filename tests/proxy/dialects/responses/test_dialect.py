"""The Responses API over HTTP: whole answers, conversations by items and by previous response, stored responses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from proxy.errors import EngineFailed
from tests.proxy.calls.world import CALL, TOOLS, USER, World, output_ids
from tests.running_app import bearer

QUESTION = "What is 17 + 25?"
CALCULATOR: Any = {"type": "function", "name": "calculator", "parameters": {"type": "object"}}
PATCH: Any = {"type": "custom", "name": "patch"}
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'


async def ask(world: World, path: str = "/v1/responses", **body: Any) -> httpx.Response:
    return await world.http.post(path, json={"model": "policy", "input": QUESTION, **body})


async def answered(world: World, **body: Any) -> dict[str, Any]:
    response = await ask(world, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Response.model_validate(answer)
    return answer


async def continuations(world: World) -> list[str]:
    return [turn.continuation for turn in await world.turns()]


async def assert_goes_on(world: World) -> None:
    """Assert that each turn continues the one before with its exact ids, in one session."""
    turns = await world.turns()
    assert len({turn.session_id for turn in turns}) == 1
    requests = world.engine.requests
    for before, after, asked, then in zip(turns, turns[1:], requests, requests[1:], strict=False):
        assert after.parent_id == before.id
        assert after.continuation == "exact"
        path = (*asked.input_ids, *output_ids(before))
        assert then.input_ids[: after.prefix_tokens] == path


# The whole answer


async def test_a_whole_answer(world: World) -> None:
    response = await ask(world, instructions="Be brief.", metadata={"a": "b"}, store=True, max_output_tokens=32000)
    turn, session = (await world.turns())[0], (await world.sessions())[0]
    answer = response.json()
    assert answer["output"] == [
        {
            "id": f"msg_{turn.id.removeprefix('turn_')}",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "The answer is 42.", "annotations": [], "logprobs": []}],
        }
    ]
    assert answer["usage"] == {
        "input_tokens": turn.prompt_token_count,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(output_ids(turn)),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.prompt_token_count + len(output_ids(turn)),
    }
    assert (answer["id"], answer["object"], answer["status"]) == (turn.id, "response", "completed")
    assert (answer["created_at"], answer["model"]) == (int(world.store.clock()), "policy")
    assert (answer["error"], answer["incomplete_details"]) == (None, None)
    assert (answer["instructions"], answer["metadata"], answer["max_output_tokens"]) == (
        "Be brief.",
        {"a": "b"},
        32000,
    )
    assert response.headers["x-base-rl-turn"] == turn.id
    assert response.headers["x-base-rl-session"] == session.id
    assert turn.messages == [{"role": "system", "content": "Be brief."}, USER]
    assert "input" not in turn.request
    assert world.seen.dialects == ["responses"]


async def test_the_prompt_equals_that_of_the_same_chat_completion(world: World) -> None:
    await ask(world, tools=[CALCULATOR])
    await world.post({"tools": TOOLS})
    assert world.engine.requests[0].input_ids == world.engine.requests[1].input_ids


async def test_the_echo_of_a_request_without_parameters(world: World) -> None:
    answer = await answered(world)
    assert (answer["temperature"], answer["top_p"], answer["tool_choice"], answer["tools"]) == (1.0, 1.0, "auto", [])
    assert (answer["parallel_tool_calls"], answer["store"], answer["truncation"]) == (True, True, "disabled")
    assert answer["text"] == {"format": {"type": "text"}}


async def test_a_truncated_answer_is_incomplete(world: World) -> None:
    answer = await answered(world, max_output_tokens=2)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"


async def test_an_empty_answer_is_an_empty_message(world: World) -> None:
    world.say("")
    answer = await answered(world)
    assert [item["content"][0]["text"] for item in answer["output"]] == [""]


async def test_function_calls(world: World) -> None:
    world.say(f"Let me see.\n{CALL}\n{CALL}")
    answer = await answered(world, tools=[CALCULATOR])
    message, *calls = answer["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "Let me see.")
    for index, call in enumerate(calls):
        assert (call["type"], call["name"], call["status"]) == ("function_call", "calculator", "completed")
        assert call["id"] == f"fc_{answer['id'].removeprefix('turn_')}_{index}"
        assert call["call_id"].startswith("call_")
        assert json.loads(call["arguments"]) == {"a": 17, "b": 25, "op": "+"}
    assert len({call["call_id"] for call in calls}) == 2


async def test_an_answer_of_calls_alone_has_no_message(world: World) -> None:
    world.say(CALL)
    assert [item["type"] for item in (await answered(world, tools=[CALCULATOR]))["output"]] == ["function_call"]


async def test_calls_of_custom_tools_and_of_namespaces(world: World) -> None:
    spaced = PATCHED.replace('"patch"', '"files__patch"')
    world.say(f"{PATCHED}\n{spaced}")
    tools = [PATCH, {"type": "namespace", "name": "files", "description": "Files.", "tools": [PATCH]}]
    plain, spaced_call = (await answered(world, tools=tools))["output"]
    assert (plain["type"], plain["name"], plain["input"]) == ("custom_tool_call", "patch", "*** Begin")
    assert "namespace" not in plain
    assert (spaced_call["name"], spaced_call["namespace"]) == ("patch", "files")


async def test_logprobs_when_they_are_asked_for(world: World) -> None:
    answer = await answered(world, include=["message.output_text.logprobs"])
    (part,) = answer["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert {entry["logprob"] for entry in part["logprobs"]} == {-0.5}
    assert bytes(part["logprobs"][0]["bytes"]).decode() == part["logprobs"][0]["token"]


async def test_warnings_are_in_a_header(world: World) -> None:
    response = await ask(world, tools=[{"type": "web_search"}], truncation="auto")
    assert response.headers["x-base-rl-warning"] == (
        "tools[0] of type web_search is ignored; truncation auto has no effect: a prompt that is too long is refused"
    )


@pytest.mark.parametrize(
    "item", ['{"role": "user", "content": "\\ud800"}', '{"id": "\\ud800"}', '{"type": "item_reference", "id": 1e}']
)
async def test_items_that_are_not_json_are_refused_with_their_place(world: World, item: str) -> None:
    response = await world.http.post("/v1/responses", content=f'{{"model": "policy", "input": [{item}]}}')
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"


async def test_an_error_has_the_envelope(world: World) -> None:
    response = await ask(world, input=[{"role": "king", "content": "x"}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input[0].role")
    response = await world.http.post("/v1/responses", content=b"[")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("prefix", ["", "/v1", "/sessions/job/v1", "/sessions/job"])
async def test_every_address_serves(world: World, prefix: str) -> None:
    response = await ask(world, f"{prefix}/responses")
    again = await world.http.get(f"{prefix}/responses/{response.json()['id']}")
    assert again.json() == response.json()


# Conversations


async def test_a_conversation_by_items_continues_with_its_recorded_ids(world: World) -> None:
    """Send the items of each answer back, as users of the SDK do."""
    world.say(f"I compute.\n{CALL}\n{CALL}", "It is 42.", "You are welcome.")
    async with world.sdk() as client:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(3):
            response = await client.responses.create(
                model="policy", instructions="Be brief.", input=items, tools=[CALCULATOR]
            )
            items += response.output
            calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
            if not calls:
                items.append({"role": "user", "content": "Thank you."})
    assert response.output_text == "You are welcome."
    await assert_goes_on(world)
    assert [len(turn.messages) for turn in await world.turns()] == [2, 2, 1]


async def test_a_conversation_by_previous_response_continues_with_its_recorded_ids(world: World) -> None:
    world.say(f"I compute.\n{CALL}", "It is 42.", "You are welcome.")
    async with world.sdk() as client:
        first = await client.responses.create(
            model="policy", instructions="Be brief.", input=QUESTION, tools=[CALCULATOR]
        )
        call = first.output[1]
        assert isinstance(call, ResponseFunctionToolCall)
        second = await client.responses.create(
            model="policy",
            instructions="Be brief.",
            tools=[CALCULATOR],
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "42"}],
        )
        third = await client.responses.create(
            model="policy",
            instructions="Be brief.",
            tools=[CALCULATOR],
            previous_response_id=second.id,
            input="Thank you.",
        )
        assert third.previous_response_id == second.id
    assert third.output_text == "You are welcome."
    await assert_goes_on(world)
    assert [turn.attributed_by for turn in await world.turns()] == ["new", "previous_response", "previous_response"]
    assert (await world.turns())[2].messages == [{"role": "user", "content": "Thank you."}]


async def test_a_call_continues_the_response_that_it_names(world: World) -> None:
    """The call must not continue another response with the same text, whose ids may differ."""
    first = await answered(world)
    world.answers[:] = [
        [*world.template.encode("The answer "), *world.template.encode("is 42."), world.answers[0][-1]]
    ]
    second = await answered(world, input=QUESTION, metadata={})
    assert first["output"][0]["content"] == second["output"][0]["content"]
    await answered(world, previous_response_id=first["id"], input="Why?")
    await answered(world, previous_response_id=second["id"], input="Why?")
    rows = await world.turns()
    assert [row.parent_id for row in rows] == [None, None, first["id"], second["id"]]
    for parent, child in ((0, 2), (1, 3)):
        path = (*world.engine.requests[parent].input_ids, *output_ids(rows[parent]))
        assert world.engine.requests[child].input_ids[: len(path)] == path


async def test_two_calls_can_continue_one_response(world: World) -> None:
    first = await answered(world)
    for question in ("Why?", "How?"):
        await answered(world, previous_response_id=first["id"], input=question)
    rows = await world.turns()
    assert [row.parent_id for row in rows] == [None, first["id"], first["id"]]
    assert await continuations(world) == ["new", "exact", "exact"]


async def test_instructions_are_not_carried_over(world: World) -> None:
    first = await answered(world, instructions="Be brief.")
    second = await answered(world, instructions="Be long.", previous_response_id=first["id"], input="Why?")
    await answered(world, previous_response_id=second["id"], input="And?")
    rows = await world.turns()
    said = {"role": "assistant", "content": "The answer is 42."}
    assert rows[1].messages == [
        {"role": "system", "content": "Be long."},
        USER,
        said,
        {"role": "user", "content": "Why?"},
    ]
    assert [message["role"] for message in rows[2].messages] == ["user", "assistant", "user", "assistant", "user"]
    assert await continuations(world) == ["new", "edited", "edited"]
    assert len({row.session_id for row in rows}) == 1


async def test_a_system_message_among_the_items_is_carried_over(world: World) -> None:
    system = {"role": "system", "content": "Be brief."}
    first = await answered(world, input=[system, {"role": "user", "content": QUESTION}])
    await answered(world, previous_response_id=first["id"], input="Why?")
    assert await continuations(world) == ["new", "exact"]


async def test_a_response_of_chat_completions_can_be_continued(world: World) -> None:
    world.say(CALL, "It is 42.")
    chat = (await world.post({"tools": TOOLS})).json()
    output = {
        "type": "function_call_output",
        "call_id": chat["choices"][0]["message"]["tool_calls"][0]["id"],
        "output": "42",
    }
    await answered(world, previous_response_id=chat["id"], input=[output], tools=[CALCULATOR])
    await assert_goes_on(world)


async def test_a_conversation_can_change_its_dialect(world: World) -> None:
    answer = await answered(world)
    text = answer["output"][0]["content"][0]["text"]
    thanks = {"role": "user", "content": "Thanks."}
    await world.post({"messages": [USER, {"role": "assistant", "content": text}, thanks]})
    await assert_goes_on(world)


async def test_a_previous_response_is_found_after_a_restart(world: World) -> None:
    """A restarted proxy has nothing in memory, like another proxy on the same store."""
    first = await answered(world)
    second = await answered(world, previous_response_id=first["id"], input="Why?")
    world.restart()
    await answered(world, previous_response_id=second["id"], input="How?")
    await assert_goes_on(world)


async def test_a_truncated_response_can_be_continued(world: World) -> None:
    first = await answered(world, max_output_tokens=3)
    await answered(world, previous_response_id=first["id"], input="Go on.")
    await assert_goes_on(world)


async def test_items_by_reference(world: World) -> None:
    world.say(f"I compute.\n{CALL}", "It is 42.")
    first = await answered(world, tools=[CALCULATOR])
    message, call = first["output"]
    items = [
        {"role": "user", "content": QUESTION},
        {"type": "item_reference", "id": message["id"]},
        {"id": call["id"]},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "42"},
    ]
    await answered(world, input=items, tools=[CALCULATOR])
    await assert_goes_on(world)


async def test_a_reference_to_an_unknown_item_is_not_found(world: World) -> None:
    for name in ("msg_unknown", "msg_01m7zrzm1dq96rr5zq53070bmm"):
        response = await ask(world, input=[{"type": "item_reference", "id": name}])
        assert (response.status_code, response.json()["error"]["param"]) == (404, "input[0].id")


async def test_custom_calls_continue_with_their_recorded_ids(world: World) -> None:
    world.say(PATCHED, PATCHED.replace("input", "text"), "Done.")
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        (call,) = (await answered(world, input=items, tools=[PATCH]))["output"]
        items += [call, {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}]
    await answered(world, input=items, tools=[PATCH])
    await assert_goes_on(world)


async def test_an_unknown_previous_response(world: World) -> None:
    for name in ("resp_1", "turn_01m7zrzm1dq96rr5zq53070bmm", "\x00"):
        response = await ask(world, previous_response_id=name)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "previous_response_not_found")
        assert error["param"] == "previous_response_id"
    assert await world.turns() == []


async def test_a_failed_response_cannot_be_continued(world: World) -> None:
    world.engine.error, world.engine.error_after = EngineFailed("broken"), 2
    assert (await ask(world, stream=True)).status_code == 200
    world.engine.error = None
    (turn,) = await world.turns()
    assert turn.state == "failed"
    response = await ask(world, previous_response_id=turn.id)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "previous_response_not_found")
    again = (await world.http.get(f"/v1/responses/{turn.id}")).json()
    assert (again["status"], again["error"]["code"]) == ("failed", "server_error")
    Response.model_validate(again)


async def test_counting_input_tokens(world: World) -> None:
    async with world.sdk() as client:
        first = await client.responses.create(model="policy", input=QUESTION, instructions="Be brief.")
        counted = await client.responses.input_tokens.count(model="policy", input=QUESTION, instructions="Be brief.")
        assert first.usage is not None
        assert counted.input_tokens == first.usage.input_tokens
        more = await client.responses.input_tokens.count(
            model="policy", input="Why?", instructions="Be brief.", previous_response_id=first.id
        )
    assert more.input_tokens > first.usage.total_tokens
    assert len(await world.turns()) == len(world.engine.requests) == 1


# Sessions


async def test_a_session_name_has_priority_over_a_previous_response(world: World) -> None:
    first = await answered(world)
    named = await world.http.post(
        "/v1/responses",
        json={"model": "policy", "input": "Why?", "previous_response_id": first["id"]},
        headers={"x-base-rl-session": "other"},
    )
    one, two = await world.turns()
    assert named.status_code == 200
    assert one.session_id != two.session_id
    assert (two.attributed_by, two.continuation) == ("header", "new")
    assert [message["role"] for message in two.messages] == ["user", "assistant", "user"]


async def test_a_previous_response_has_priority_over_weaker_names(world: World) -> None:
    first = await answered(world, user="u", prompt_cache_key="k")
    await answered(world, user="v", prompt_cache_key="l", previous_response_id=first["id"], input="Why?")
    one, two = await world.turns()
    assert (two.session_id, two.attributed_by) == (one.session_id, "previous_response")


async def test_a_response_of_an_ended_session_is_continued_in_a_new_session(world: World) -> None:
    """Turns after the end of a session would not be trained, so the conversation gets a new session."""
    first = await answered(world)
    (session,) = await world.sessions()
    await world.http.post(f"/v1/sessions/{session.id}/end", json={})
    await answered(world, previous_response_id=first["id"], input="Why?")
    one, two = await world.turns()
    assert one.session_id != two.session_id
    assert (two.continuation, len(two.messages)) == ("new", 3)


async def test_a_session_key_sees_only_its_session(world: World) -> None:
    first = await answered(world)
    _, key = await world.session_key()
    mine = await world.http.post(
        "/v1/responses",
        json={"model": "policy", "input": "Why?", "previous_response_id": first["id"]},
        headers=bearer(key),
    )
    assert mine.json()["error"]["code"] == "previous_response_not_found"
    assert (await world.http.get(f"/v1/responses/{first['id']}", headers=bearer(key))).status_code == 404


# What is read again


async def test_a_recorded_response_can_be_read(world: World) -> None:
    world.say(f"I compute.\n{CALL}")
    async with world.sdk() as client:
        first = await client.responses.create(model="policy", input=QUESTION, tools=[CALCULATOR], temperature=0.5)
        assert (await client.responses.retrieve(first.id)).model_dump() == first.model_dump()


async def test_a_turn_of_chat_completions_is_read_as_a_response(world: World) -> None:
    chat = (await world.post({"tools": TOOLS})).json()
    response = Response.model_validate((await world.http.get(f"/v1/responses/{chat['id']}")).json())
    assert response.output_text == "The answer is 42."
    assert [tool.type for tool in response.tools] == ["function"]


async def test_the_input_items_of_a_conversation(world: World) -> None:
    world.say(CALL, "It is 42.")
    first = await answered(world, instructions="Be brief.", tools=[CALCULATOR])
    output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "42"}
    second = await answered(
        world, instructions="Be brief.", tools=[CALCULATOR], previous_response_id=first["id"], input=[output]
    )
    async with world.sdk() as client:
        newest = await client.responses.input_items.list(second["id"], limit=2)
        assert [item.type for item in newest.data] == ["function_call_output", "function_call"]
        assert newest.has_more
        every = [item async for item in client.responses.input_items.list(second["id"], limit=1, order="asc")]
    assert [item.type for item in every] == ["message", "function_call", "function_call_output"]
    assert len({item.id for item in every}) == 3


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": "0"}, "limit"), ({"limit": "x"}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")],
)
async def test_invalid_pages_of_input_items_are_refused(world: World, query: dict[str, str], param: str) -> None:
    first = await answered(world)
    response = await world.http.get(f"/v1/responses/{first['id']}/input_items", params=query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_response_with_store_false_is_trained_on_but_cannot_be_read(world: World) -> None:
    first = await answered(world, store=False)
    assert first["store"] is False
    assert len(await world.turns()) == 1
    assert (await world.http.get(f"/v1/responses/{first['id']}")).status_code == 404
    assert (await ask(world, previous_response_id=first["id"])).status_code == 404
    again = [{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": "Why?"}]
    await answered(world, store=False, input=again)
    await assert_goes_on(world)


async def test_unknown_responses_are_not_found(world: World) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        response = await world.http.request(method, f"/v1/responses/resp_1{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_unsupported_operations_on_a_recorded_response_are_refused(world: World) -> None:
    first = await answered(world)
    async with world.sdk() as client:
        with pytest.raises(openai.PermissionDeniedError, match="recorded turn"):
            await client.responses.delete(first["id"])
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(first["id"])
        with pytest.raises(openai.BadRequestError, match="whole"):
            await client.responses.retrieve(first["id"], stream=True)
    assert len(await world.turns()) == 1
