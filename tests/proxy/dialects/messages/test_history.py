"""Conversion of Anthropic's messages into messages in the shape of chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.messages.history import read_history
from proxy.errors import InvalidRequest, UnsupportedParameter

ASK: Any = {"role": "user", "content": "Hi."}
USE: Any = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"x": [1.5, None]}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "call_1", "content": "42"}


def text(written: str) -> dict[str, Any]:
    return {"type": "text", "text": written}


def said(*messages: dict[str, Any], system: Any = None) -> list[dict[str, Any]]:
    return read_history(system, [*messages, {"role": "system", "content": "END"}]).messages[:-1]


def assistant_messages(*blocks: Any) -> list[dict[str, Any]]:
    """Convert the blocks of an assistant's message after a question."""
    return said(ASK, {"role": "assistant", "content": list(blocks)})[1:]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (None, []),
        ("", []),
        ([], []),
        ("Be brief.", ["Be brief."]),
        ([text("Be"), {**text("brief."), "cache_control": {"type": "ephemeral"}}], ["Be\nbrief."]),
    ],
)
def test_system_is_a_string_or_blocks_and_comes_first(system: Any, expected: list[str]) -> None:
    messages = read_history(system, [ASK]).messages
    assert messages == [*({"role": "system", "content": line} for line in expected), ASK]


def test_claude_codes_report_of_itself_is_dropped() -> None:
    """The block changes with every call, so no prompt would extend the previous one."""
    blocks = [text("x-anthropic-billing-header: cc_version=2.1.330; cch=1a2b3;"), text("Be brief.")]
    assert read_history(blocks, [ASK]).messages[0]["content"] == "Be brief."


def test_a_users_blocks_are_joined_as_lines() -> None:
    assert read_history(None, [{"role": "user", "content": [text("a"), text("b")]}]).messages == [
        {"role": "user", "content": "a\nb"}
    ]


def test_consecutive_messages_of_one_role_are_one() -> None:
    answer = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": [text(" b"), USE]}]
    messages = read_history(None, [ASK, {"role": "user", "content": "There?"}, *answer, ASK]).messages
    assert messages[0] == {"role": "user", "content": "Hi.\nThere?"}
    assert (messages[1]["content"], len(messages[1]["tool_calls"])) == ("a b", 1)
    assert messages[2] == ASK


def test_a_later_system_message_stays_in_its_place() -> None:
    messages = read_history("Be brief.", [ASK, {"role": "system", "content": [text("Hurry.")]}]).messages
    assert [message["role"] for message in messages] == ["system", "user", "system"]


def test_consecutive_system_messages_are_one() -> None:
    messages = read_history(
        "Be brief.", [{"role": "system", "content": "Hurry."}, ASK], system_anywhere=False
    ).messages
    assert messages == [{"role": "system", "content": "Be brief.\nHurry."}, ASK]


def test_a_later_system_message_is_a_users_reminder_if_the_template_refuses_it() -> None:
    late: Any = {"role": "system", "content": "Hurry."}
    result = {"role": "user", "content": [RESULT]}
    called: Any = {"role": "assistant", "content": [USE]}
    messages = read_history("Be brief.", [ASK, late, called, result, late], system_anywhere=False).messages
    reminder = "<system-reminder>\nHurry.\n</system-reminder>"
    assert messages[1] == {"role": "user", "content": f"Hi.\n{reminder}"}
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "user"]
    assert messages[-1]["content"] == reminder


def test_results_stand_in_the_order_of_their_calls() -> None:
    """Most templates print no call ids, so only the order connects results with calls."""
    uses = [{**USE, "id": name} for name in ("a", "b", "c")]
    results = [{**RESULT, "tool_use_id": name, "content": name} for name in ("c", "other", "a")]
    later = {"role": "user", "content": [{**RESULT, "tool_use_id": "b", "content": "b"}, text("And?")]}
    messages = said(ASK, {"role": "assistant", "content": uses}, {"role": "user", "content": results}, later)
    assert [message["content"] for message in messages[2:]] == ["a", "b", "c", "other", "And?"]


def test_an_answers_texts_are_joined_without_a_separator() -> None:
    assert assistant_messages(text("4"), text("2")) == [{"role": "assistant", "content": "42"}]


def test_tool_use_is_a_call_with_its_input_as_json() -> None:
    (message,) = assistant_messages(text("So:"), USE, {**USE, "id": "call_2", "input": {}})
    first, second = message["tool_calls"]
    assert message["content"] == "So:"
    assert (first["id"], first["type"], first["function"]["name"]) == ("call_1", "function", "f")
    assert json.loads(first["function"]["arguments"]) == {"x": [1.5, None]}
    assert second["function"]["arguments"] == "{}"


def test_thinking_becomes_reasoning_and_redacted_thinking_is_dropped() -> None:
    thoughts = [{"type": "thinking", "thinking": part, "signature": "s"} for part in ("Hm. ", "Yes.")]
    (message,) = assistant_messages(*thoughts, {"type": "redacted_thinking", "data": "x"}, text("42"))
    assert message == {"role": "assistant", "content": "42", "reasoning_content": "Hm. Yes."}
    assert assistant_messages({"type": "thinking", "thinking": "", "signature": "s"}) == [
        {"role": "assistant", "content": ""}
    ]


@pytest.mark.parametrize("content", [None, "", []])
def test_an_empty_answer_becomes_a_message(content: Any) -> None:
    assert said(ASK, {"role": "assistant", "content": content})[1:] == [{"role": "assistant", "content": ""}]


def test_results_are_messages_of_role_tool_where_they_stand() -> None:
    second = {**RESULT, "tool_use_id": "call_2", "content": [text("a"), text("b")]}
    content = [RESULT, second, text("And?")]
    messages = read_history(
        None, [ASK, {"role": "assistant", "content": [USE]}, {"role": "user", "content": content}]
    )
    assert messages.messages[2:] == [
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        {"role": "tool", "tool_call_id": "call_2", "content": "a\nb"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize(
    ("content", "is_error", "expected"),
    [
        ("no file", True, "Error: no file"),
        ("Error: no file", True, "Error: no file"),
        ("", True, "Error"),
        (None, True, "Error"),
        (None, False, ""),
        ([], None, ""),
        ("no file", None, "no file"),
    ],
)
def test_an_error_result_is_marked_in_its_text(content: Any, is_error: Any, expected: str) -> None:
    block = {**RESULT, "content": content, "is_error": is_error}
    assert said({"role": "user", "content": [block]}) == [
        {"role": "tool", "tool_call_id": "call_1", "content": expected}
    ]


@pytest.mark.parametrize(
    ("last", "prefill"),
    [
        ([{"role": "assistant", "content": "The answer"}], "The answer"),
        ([{"role": "assistant", "content": [text("The "), text("answer")]}], "The answer"),
        ([{"role": "assistant", "content": "The "}, {"role": "assistant", "content": "answer"}], "The answer"),
        ([{"role": "assistant", "content": ""}], ""),
        ([], ""),
    ],
)
def test_a_last_message_of_the_assistant_is_the_prefill(last: list[Any], prefill: str) -> None:
    history = read_history(None, [ASK, *last])
    assert (history.messages, history.prefill) == ([ASK], prefill)


def wrong(content: Any, role: str = "user") -> list[Any]:
    return [ASK, {"role": "assistant", "content": "a"}, {"role": role, "content": content}]


@pytest.mark.parametrize(
    ("system", "messages", "param"),
    [
        (1, [ASK], "system"),
        ([{"type": "image"}], [ASK], "system[0].type"),
        ([{"type": "text"}], [ASK], "system[0].text"),
        (None, [1], "messages[0]"),
        (None, [{"content": "x"}], "messages[0].role"),
        (None, [{"role": "tool", "content": "x"}], "messages[0].role"),
        (None, [{"role": "user"}], "messages[0].content"),
        (None, [{"role": "user", "content": 1}], "messages[0].content"),
        (None, [{"role": "assistant", "content": "x"}], "messages"),
        (None, wrong([1]), "messages[2].content[0]"),
        (None, wrong([{}]), "messages[2].content[0].type"),
        (None, wrong([{"type": "text", "text": None}]), "messages[2].content[0].text"),
        (None, wrong([USE]), "messages[2].content[0].type"),
        (None, wrong([text("a"), {"type": "image", "source": {}}]), "messages[2].content[1].type"),
        (None, wrong([{"type": "document", "source": {}}]), "messages[2].content[0].type"),
        (None, wrong([{**RESULT, "tool_use_id": 1}]), "messages[2].content[0].tool_use_id"),
        (None, wrong([{**RESULT, "content": 1}]), "messages[2].content[0].content"),
        (None, wrong([{**RESULT, "content": [{"type": "image"}]}]), "messages[2].content[0].content[0].type"),
        (None, wrong([RESULT], "system"), "messages[2].content[0].type"),
        (None, [ASK, {"role": "assistant", "content": [RESULT]}, ASK], "messages[1].content[0].type"),
        (None, [ASK, {"role": "assistant", "content": [{**USE, "id": None}]}, ASK], "messages[1].content[0].id"),
        (None, [ASK, {"role": "assistant", "content": [{**USE, "name": 1}]}, ASK], "messages[1].content[0].name"),
        (None, [ASK, {"role": "assistant", "content": [{**USE, "input": "x"}]}, ASK], "messages[1].content[0].input"),
        (
            None,
            [ASK, {"role": "assistant", "content": [{"type": "thinking"}]}, ASK],
            "messages[1].content[0].thinking",
        ),
        (None, [ASK, {"role": "assistant", "content": [USE]}], "messages[1].content"),
        (
            None,
            [ASK, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}],
            "messages[1].content",
        ),
        (None, [ASK, {"role": "assistant", "content": "The answer "}], "messages[1].content"),
    ],
)
def test_an_error_names_its_place(system: Any, messages: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_history(system, messages)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["image", "document", "server_tool_use", "web_search_tool_result"])
def test_content_that_is_not_text_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedParameter, match="text, tool_result"):
        said({"role": "user", "content": [{"type": kind}]})
