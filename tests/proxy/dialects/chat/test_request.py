"""Bodies of POST /v1/chat/completions: invalid ones are a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.calls.call import AnswerFormat, ModelCall, ToolChoice, ToolUse
from proxy.calls.remembered import Remembered
from proxy.dialects.chat.request import parse_chat_completion
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.settings import RequestSettings

USER = {"role": "user", "content": "x"}


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def allowed(tools: Any, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def schema(**described: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": {}, **described}}


def parse(**body: Any) -> Any:
    """Parse a body and all its messages, which are otherwise parsed on access."""
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
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": allowed(3)}, "tool_choice.allowed_tools.tools"),
        ({"tools": TOOLS, "tool_choice": allowed([], mode="x")}, "tool_choice.allowed_tools.mode"),
        (
            {"tools": TOOLS, "tool_choice": allowed([{"type": "function", "function": {"name": "g"}}])},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"functions": {}}, "functions"),
        ({"functions": [3]}, "functions[0]"),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [{"name": "f"}], "tools": TOOLS}, "functions"),
        ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
        ({"function_call": "auto"}, "function_call"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
        ({"messages": [{**USER, "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call.name"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}, "tool_calls": CALLS}]},
            "messages[0].function_call",
        ),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": schema(schema=3)}, "response_format.json_schema.schema"),
        ({"response_format": schema(name=3)}, "response_format.json_schema.name"),
        ({"response_format": schema(strict="yes")}, "response_format.json_schema.strict"),
        ({"modalities": "text"}, "modalities"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
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
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        (
            {"tools": TOOLS, "tool_choice": allowed([{"type": "mcp", "server_label": "x"}])},
            "tool_choice.allowed_tools.tools[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": [{"type": "file"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": assistant([{"type": "custom"}])}, "messages[1].tool_calls[0].type"),
    ],
)
def test_unsupported_fields_are_refused_by_name(body: dict[str, Any], param: str) -> None:
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
def test_a_body_that_is_not_a_json_object_is_refused(raw: bytes) -> None:
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
     "response_format", "seed", "top_k", "messages", "model", "stream", "logprobs", "functions", "function_call",
     "chat_template_kwargs", "modalities", "reasoning_effort", "top_logprobs"]
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "function", "x"])},
        optional={"content": JSON, "tool_calls": JSON, "name": JSON, "function_call": JSON},
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


def read(raw: bytes, **how: Any) -> Any:
    """Return a parsed body with its messages, or what it is refused with."""
    try:
        call = parse_chat_completion(raw, **how)
        return msgspec.structs.replace(call, messages=list(call.messages))
    except InvalidRequest as error:
        return str(error), error.param


@given(st.dictionaries(FIELDS, JSON, max_size=4), MESSAGES, MESSAGES)
def test_remembered_fields_change_nothing(fields: dict[str, Any], first: list[Any], second: list[Any]) -> None:
    memory: Remembered[ModelCall] = Remembered()
    for messages in (first, second, first):
        raw = json.dumps({"model": "m", "messages": messages, **fields}).encode()
        assert read(raw, memory=memory) == read(raw)


def test_fields_are_remembered_for_equal_fields_only() -> None:
    memory: Remembered[ModelCall] = Remembered()
    warm = {"model": "m", "temperature": 0.5, "chat_template_kwargs": {"brief": True}}
    bodies = [warm, {**warm, "temperature": 1}, dict(reversed(warm.items()))]
    for body in bodies * 2:
        raw = json.dumps({"messages": [USER], **body}).encode()
        for known in (frozenset[str](), frozenset({"brief"})):
            assert read(raw, known=known, memory=memory) == read(raw, known=known)
            assert list(read(raw, known=known, memory=memory).body) == list(body)


def test_messages_are_bounded_also_where_the_fields_are_remembered() -> None:
    memory: Remembered[ModelCall] = Remembered()
    bodies = [json.dumps({"model": "m", "messages": [USER] * count}).encode() for count in (1, 3, 0)]
    bounds = RequestSettings(max_messages=2)
    assert [read(raw, memory=memory, bounds=bounds) for raw in bodies] == [read(raw, bounds=bounds) for raw in bodies]
    assert "max_messages" in read(bodies[1], memory=memory, bounds=bounds)[0]


@given(st.binary(max_size=40))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        list(parse_chat_completion(raw).messages)


def test_stop_may_be_text_or_a_list() -> None:
    assert parse(stop="a").sampling.stop == ("a",)
    assert parse(stop=["a", "b"]).sampling.stop == ("a", "b")
    assert parse(stop=None).sampling.stop == ()


def test_max_completion_tokens_has_priority_over_max_tokens() -> None:
    assert parse(max_tokens=5, max_completion_tokens=7).sampling.max_new_tokens == 7
    assert parse(max_tokens=5).sampling.max_new_tokens == 5


def test_whole_numbers_are_accepted_as_floats() -> None:
    assert parse(temperature=1, top_p=1, logit_bias={"5": 1}).sampling.temperature == 1.0


def test_nulls_inside_tools_are_not_written_into_the_prompt() -> None:
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": None}
    assert parse(tools=[tool]).tools == [{"type": "function", "function": {"name": "f"}}]


def test_tool_choice_in_all_its_forms() -> None:
    g = {"type": "function", "function": {"name": "g"}}
    both = [*TOOLS, g]
    assert parse(tools=both).tool_choice == parse(tools=both, tool_choice="auto").tool_choice == ToolChoice()
    assert parse(tools=both, tool_choice="none").tools is None
    assert parse(tools=both, tool_choice="required").tool_choice == ToolChoice(use=ToolUse.REQUIRED)
    assert parse(tools=both, tool_choice=g).tool_choice == ToolChoice(use=ToolUse.REQUIRED, name="g")
    some = parse(tools=both, tool_choice=allowed([g], mode="required"))
    assert (some.tools, some.tool_choice) == ([g], ToolChoice(use=ToolUse.REQUIRED))


def test_response_format_in_all_its_forms() -> None:
    assert parse(response_format={"type": "text"}).answer_format is None
    assert parse(response_format={"type": "json_object"}).answer_format == AnswerFormat(where="response_format")
    assert parse(response_format=schema(schema={"type": "object"}, strict=True)).answer_format == AnswerFormat(
        schema={"type": "object"}, name="answer", strict=True
    )
    assert parse(response_format={"type": "json_schema", "json_schema": {"name": "x"}}).answer_format == AnswerFormat(
        schema={}, name="x"
    )


def test_strict_is_true_or_false() -> None:
    for tools in (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
        {"functions": [{"name": "f", "strict": 1}]},
    ):
        with pytest.raises(InvalidRequest) as refused:
            parse(**tools)
        assert str(refused.value.param).endswith("strict")


def test_the_deprecated_form_of_tools_is_converted() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    call = parse(functions=[function], function_call={"name": "f"})
    assert call.tools == [{"type": "function", "function": function}]
    assert call.tool_choice == ToolChoice(use=ToolUse.REQUIRED, name="f")
    assert not call.parallel_calls
    assert parse(functions=[function], function_call="none").tools is None
    assert parse(functions=[]).tools is None
    said = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    messages = parse(messages=[USER, said, {"role": "function", "name": "f", "content": "42"}]).messages
    assert messages[1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    assert messages[2] == {"role": "tool", "name": "f", "content": "42"}
    assert parse(messages=[{"role": "function", "name": "f", "content": None}]).messages[0]["content"] == ""


def known(*names: str, **body: Any) -> Any:
    raw = json.dumps({"model": "m", "messages": [USER], **body}).encode()
    return parse_chat_completion(raw, frozenset(names))


def test_template_arguments_reach_the_template_or_cause_a_warning() -> None:
    asked = {"chat_template_kwargs": {"enable_thinking": False, "odd\n": 1}, "reasoning_effort": "low"}
    call = known("enable_thinking", "reasoning_effort", **asked)
    assert call.template_arguments == {"enable_thinking": False, "reasoning_effort": "low"}
    assert call.warnings == ("the model's template does not read odd?",)
    assert known(**asked).template_arguments == {}
    assert "the model's template does not read reasoning_effort" in known(**asked).warnings


def test_effort_none_switches_thinking_off_if_the_template_can() -> None:
    assert known("enable_thinking", reasoning_effort="none").template_arguments == {"enable_thinking": False}
    assert known("enable_thinking", reasoning_effort="none").warnings == ()
    assert known("enable_thinking", reasoning_effort="high").template_arguments == {}


@pytest.mark.parametrize(
    ("body", "warns"),
    [
        ({"store": True}, "store has no effect"),
        ({"store": False}, None),
        ({"service_tier": "priority"}, "service_tier has no effect"),
        ({"service_tier": "auto"}, None),
        ({"verbosity": "low"}, "verbosity has no effect"),
        ({"verbosity": "medium"}, None),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction has no effect"),
        ({"web_search_options": {}}, "web_search_options has no effect"),
        ({"audio": {"voice": "alloy"}, "modalities": ["text"]}, "audio has no effect"),
        ({"modalities": ["text"]}, None),
        ({"metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k", "safety_identifier": "s"}, None),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0] of type custom is ignored"),
    ],
)
def test_ignored_fields_cause_a_warning_if_they_ask_for_something(body: dict[str, Any], warns: str | None) -> None:
    assert parse(**body).warnings == ((warns,) if warns else ())
