"""Bounds on one call: refused before work is done, and what is allowed but large is done beside the event loop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from proxy.calls.call import ModelCall
from proxy.dialects.chat.request import parse_chat_completion
from proxy.dialects.completions.request import parse_completion
from proxy.dialects.messages.history import read_history
from proxy.dialects.messages.request import parse_count_tokens, parse_messages
from proxy.dialects.responses.item_reader import ItemReader
from proxy.dialects.responses.request import read_response_request
from proxy.errors import InvalidRequest
from proxy.settings import RequestSettings
from proxy.tokens.template import ChatTemplate
from tests.proxy.calls.world import USER, World

Parse = Callable[..., ModelCall]

FEW = RequestSettings(max_messages=3, max_parts=3, max_tools=3, max_prompt_ids=3)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "look", "parameters": {"type": "object"}}
OWN = {"name": "look", "input_schema": {"type": "object"}}
TEXT = {"type": "text", "text": "a"}
PARSERS: dict[str, Parse] = {
    "chat": parse_chat_completion,
    "messages": partial(parse_messages, known=frozenset()),
    "count": partial(parse_count_tokens, known=frozenset()),
    "responses": read_response_request,
    "completions": partial(parse_completion, text_of=str),
}


def call(dialect: str, **body: Any) -> ModelCall:
    raw = json.dumps({"model": "m", "max_tokens": 1, **body}).encode()
    parsed = PARSERS[dialect](raw, bounds=FEW)
    list(parsed.messages)  # messages of chat completions are read on access
    return parsed


@pytest.mark.parametrize(
    ("dialect", "field", "element", "beside", "key"),
    [
        ("chat", "messages", USER, {}, "max_messages"),
        ("messages", "messages", USER, {}, "max_messages"),
        ("count", "messages", USER, {}, "max_messages"),
        ("responses", "input", USER, {}, "max_messages"),
        ("chat", "tools", TOOL, {"messages": [USER]}, "max_tools"),
        ("chat", "functions", TOOL["function"], {"messages": [USER]}, "max_tools"),
        ("responses", "tools", FLAT, {"input": "a"}, "max_tools"),
        ("completions", "prompt", 7, {}, "max_prompt_ids"),
    ],
)
def test_lists_have_a_bound(dialect: str, field: str, element: Any, beside: dict[str, Any], key: str) -> None:
    assert call(dialect, **beside, **{field: [element] * 3})
    with pytest.raises(InvalidRequest, match=rf"4 .* at most 3 .*requests\.{key}") as refused:
        call(dialect, **beside, **{field: [element] * 4})
    assert refused.value.param == field


def test_tools_of_anthropic_have_a_bound() -> None:
    tools = [{**OWN, "name": f"look{number}"} for number in range(4)]
    assert call("messages", messages=[USER], tools=tools[:3])
    with pytest.raises(InvalidRequest, match="max_tools"):
        call("messages", messages=[USER], tools=tools)


def test_tools_in_namespaces_and_in_items_count() -> None:
    tools = [{**FLAT, "name": f"look{number}"} for number in range(4)]
    with pytest.raises(InvalidRequest, match="max_tools"):
        call("responses", input="a", tools=[{"type": "namespace", "name": "n", "tools": tools}])
    with pytest.raises(InvalidRequest, match="max_tools"):
        call("responses", input=[USER, {"type": "additional_tools", "tools": tools}])


def test_ids_of_all_prompts_count_together() -> None:
    assert call("completions", prompt=[[1, 2], [3]])
    with pytest.raises(InvalidRequest, match="max_prompt_ids"):
        call("completions", prompt=[[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("dialect", "field", "message", "param"),
    [
        ("chat", "messages", {"role": "user", "content": [TEXT] * 4}, "messages[0].content"),
        ("messages", "messages", {"role": "user", "content": [TEXT] * 4}, "messages[0].content"),
        ("responses", "input", {"role": "user", "content": [TEXT] * 4}, "input[0].content"),
        (
            "chat",
            "messages",
            {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}] * 4},
            "messages[0].tool_calls",
        ),
    ],
)
def test_parts_of_one_message_have_a_bound(dialect: str, field: str, message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=r"at most 3 .*requests\.max_parts") as refused:
        call(dialect, **{field: [message, USER]})
    assert refused.value.param == param


async def read(world: World, body: bytes, parse: Parse, *, prompt_ids: bool = False) -> ModelCall:
    model = await world.calls.model_of(world.store.owner)
    return await world.calls.read(body, parse, model.runtime, prompt_ids=prompt_ids)


def never(_raw: bytes) -> ModelCall:
    raise AssertionError("it was read")


async def test_a_body_of_many_values_is_not_decoded(world: World) -> None:
    message = json.dumps(USER).encode()
    for many in (b"[%b]" % b",".join([message] * 50_000), b"[%b]" % b",".join([b"[]"] * 200_000)):
        with pytest.raises(InvalidRequest, match=r"more than 100000 JSON values \(requests\.max_values\)"):
            await read(world, b'{"messages":%b}' % many, never)


@pytest.mark.parametrize("escape", ["\\n", "\\u4e2d", '\\"'])
async def test_a_text_of_escapes_is_not_decoded(world: World, escape: str) -> None:
    body = b'{"model":"policy","messages":[{"role":"user","content":"%b"}]}' % (escape.encode() * 1_000_000)
    with pytest.raises(AssertionError, match="it was read"):
        await read(world, body, never)
    with pytest.raises(InvalidRequest, match=r"1000000 backslashes \(requests\.max_escapes\)"):
        await read(world, body.replace(b'content":"', b'content":"\\t'), never)


async def test_ids_of_prompts_have_room_of_their_own(world: World) -> None:
    body = b'{"model":"policy","prompt":[%b]}' % b",".join([b"7"] * 150_000)
    with pytest.raises(InvalidRequest, match="max_values"):
        await read(world, body, never)
    with pytest.raises(AssertionError, match="it was read"):
        await read(world, body, never, prompt_ids=True)


async def test_everything_but_the_conversation_has_a_bound_in_bytes(world: World) -> None:
    body = json.dumps({"model": "policy", "metadata": {"a": "b" * (5 << 20)}, "messages": [USER]}).encode()
    with pytest.raises(InvalidRequest, match=r"4 MiB .*requests\.max_options_mib.*metadata has 52") as refused:
        await read(world, body, never)
    assert refused.value.param == "metadata"


async def test_values_inside_of_arguments_count(world: World) -> None:
    inner = "[" + ",".join(["[]"] * 200_000) + "]"
    calls = [{"type": "function", "id": "c", "function": {"name": "look", "arguments": inner + " " * (1 << 20)}}]
    answer = await world.post({"messages": [USER, {"role": "assistant", "tool_calls": calls}, USER]})
    assert answer.status_code == 400
    assert "arguments" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")],
)
async def test_900_000_messages_are_a_400_with_advice(world: World, path: str, field: str) -> None:
    raw = b'{"model":"policy","max_tokens":1,"%b":[%b]}' % (
        field.encode(),
        b",".join([b'{"role":"user","content":"a"}'] * 900_000),
    )
    answer = await world.http.post(path, content=raw)
    assert answer.status_code == 400
    assert "requests.max_values" in answer.text


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/responses", "input"),
        ("/v1/responses/input_tokens", "input"),
    ],
)
async def test_a_large_call_is_read_and_rendered_beside_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    threads = spy(monkeypatch)
    messages = [{"role": "user" if number % 2 else "assistant", "content": "a"} for number in range(1, 1000)]
    body = {"model": "policy", "max_tokens": 1, field: messages}
    await world.http.post(path, json=body)
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("prompt", ["a " * 10_000, [[7] * 100] * 200])
async def test_large_prompts_are_tokenised_beside_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    threads = spy(monkeypatch)
    await world.http.post("/v1/completions", json={"model": "policy", "prompt": prompt})
    assert threading.get_ident() not in threads


async def test_one_long_message_in_a_small_call_is_tokenised_beside_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = spy(monkeypatch)
    await world.post({"messages": [{"role": "user", "content": "word " * 5_000}]})
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("text", ["a", "<|im_end|>", "é😀", " "])
@pytest.mark.parametrize("length", [2_500, 16_000, 100_000])
async def test_text_beyond_the_context_is_reported_as_too_long(world: World, text: str, length: int) -> None:
    """The context has 512 tokens."""
    answer = await world.post({"messages": [{"role": "assistant", "content": text * length}, USER]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def spy(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the threads on which the template renders and tokenises from now on."""
    threads: set[int] = set()
    for name in ("render", "encode", "check_length"):
        original = getattr(ChatTemplate, name)

        def noted(*given: Any, _original: Any = original, **named: Any) -> Any:
            threads.add(threading.get_ident())
            return _original(*given, **named)

        monkeypatch.setattr(ChatTemplate, name, noted)
    return threads


async def test_a_large_call_is_answered_and_can_be_continued(world: World) -> None:
    messages: list[Any] = [{"role": "user" if number % 2 else "assistant", "content": "a"} for number in range(1, 40)]
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(3)]
    metadata = {f"key{number}": "v" for number in range(9_000)}
    first = await world.post({"messages": messages, "tools": tools, "metadata": metadata, "max_tokens": 4})
    assert first.status_code == 200, first.text
    messages += [first.json()["choices"][0]["message"], USER]
    second = await world.post({"messages": messages, "tools": tools, "metadata": metadata, "max_tokens": 4})
    assert second.status_code == 200, second.text
    assert [turn.continuation for turn in await world.turns()] == ["new", "exact"]


async def test_choices_of_one_call_share_its_request(world: World) -> None:
    await world.post({"n": 3, "metadata": {"a": "b"}})
    turns = await world.turns()
    (first,) = (turn for turn in turns if turn.request is not None)
    assert first.request["metadata"] == {"a": "b"}
    assert [turn.request_of for turn in turns if turn is not first] == [first.id] * 2


_PIECES, _PIECE = 4_000, "a" * 8_192
"""Joined one by one, these would be 64 GB of copies, which take ten seconds and more."""


def test_blocks_are_joined_in_time_by_their_number() -> None:
    begun = time.process_time()
    answers = [{"role": "assistant", "content": [{"type": "text", "text": _PIECE}]}] * _PIECES
    history = read_history(None, [USER, *answers, USER])
    assert len(history.messages[1]["content"]) == _PIECES * len(_PIECE)
    assert time.process_time() - begun < 5


def test_items_of_one_answer_are_joined_in_time_by_their_number() -> None:
    begun = time.process_time()
    own = "msg_" + "0" * 26
    item = {"type": "message", "role": "assistant", "id": own, "content": [{"type": "output_text", "text": _PIECE}]}
    thought = {"type": "reasoning", "id": "rs_" + "0" * 26, "content": [{"type": "reasoning_text", "text": _PIECE}]}
    reader = ItemReader({})
    reader.read([json.dumps(one).encode() for one in (*[thought] * _PIECES, *[item] * _PIECES)])  # type: ignore[misc]
    (answer,) = reader.messages
    assert len(answer["content"]) == len(answer["reasoning_content"]) == _PIECES * len(_PIECE)
    assert time.process_time() - begun < 5
