"""Bad bodies: a clear 400 that names the field, never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.chat.wire import parse_chat_completion
from proxy.errors import InvalidRequest, UnsupportedParameter

USER = {"role": "user", "content": "x"}


def parse(**body: Any) -> Any:
    """Reads the messages too, which are otherwise read when they are looked at."""
    call = parse_chat_completion(json.dumps({"model": "m", "messages": [USER], **body}).encode())
    assert list(call.messages)
    return call


def assistant(call: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": None, "tool_calls": call}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "king", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{**USER, "name": 3}]}, "messages[0].name"),
        ({"messages": [{**USER, "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": assistant("x")}, "messages[1].tool_calls"),
        ({"messages": assistant([3])}, "messages[1].tool_calls[0]"),
        ({"messages": assistant([{}])}, "messages[1].tool_calls[0].function"),
        ({"messages": assistant([{"function": {}}])}, "messages[1].tool_calls[0].function.name"),
        (
            {"messages": assistant([{"function": {"name": "f", "arguments": {}}}])},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"messages": assistant([{"id": 3, "function": {"name": "f"}}])}, "messages[1].tool_calls[0].id"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": [3]}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"response_format": "json"}, "response_format"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 129}, "n"),
    ],
)
def test_a_wrong_value_names_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    assert caught.value.param == param
    assert not isinstance(caught.value, UnsupportedParameter)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call"),
        ({"messages": assistant([{"type": "custom"}])}, "messages[1].tool_calls[0].type"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"a":1}x',
        b'{"a": NaN}',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "a\x00b"}]}',
        b'{"temperature": 1e999}',
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body is not"):
        list(parse_chat_completion(raw).messages)


def test_an_unpaired_surrogate_is_named() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        parse_chat_completion(b'{"model": "\\ud800"}')


def test_an_escaped_nul_is_a_character() -> None:
    assert parse(messages=[{"role": "user", "content": "a\0b"}]).messages[0]["content"] == "a\0b"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["tools", "tool_choice", "n", "max_tokens", "temperature", "stop", "logit_bias", "stream_options",
     "response_format", "seed", "top_k", "messages", "model", "stream", "logprobs"]
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"])},
        optional={"content": JSON, "tool_calls": JSON, "name": JSON},
    ),
    max_size=3,
)


@given(st.dictionaries(FIELDS, JSON, max_size=4), MESSAGES)
def test_any_json_is_parsed_or_refused(fields: dict[str, Any], messages: list[Any]) -> None:
    raw = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    try:
        call = parse_chat_completion(raw)
        list(call.messages)
    except InvalidRequest:
        return
    assert call.messages


@given(st.binary(max_size=40))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        list(parse_chat_completion(raw).messages)


def test_stop_may_be_text_or_a_list() -> None:
    assert parse(stop="a").sampling.stop == ("a",)
    assert parse(stop=["a", "b"]).sampling.stop == ("a", "b")
    assert parse(stop=None).sampling.stop == ()


def test_max_completion_tokens_come_before_max_tokens() -> None:
    assert parse(max_tokens=5, max_completion_tokens=7).sampling.max_new_tokens == 7
    assert parse(max_tokens=5).sampling.max_new_tokens == 5


def test_whole_numbers_are_numbers() -> None:
    assert parse(temperature=1, top_p=1, logit_bias={"5": 1}).sampling.temperature == 1.0


def test_nulls_inside_tools_are_not_written_into_the_prompt() -> None:
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": None}
    assert parse(tools=[tool]).tools == [{"type": "function", "function": {"name": "f"}}]
