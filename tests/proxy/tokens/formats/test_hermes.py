from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tokens.formats import ToolCall
from proxy.tokens.formats.hermes import HermesParser
from tests.proxy.tokens.pieces import text_and_calls, told

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": [2.0, "x}"]}}\n</tool_call>'


def parse(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    content, calls = text_and_calls(told(HermesParser(), [text]))
    return content, tuple(calls)


@given(st.text(alphabet="ab <>/tool_call\n{}"))
def test_text_without_calls_is_returned_unchanged(text: str) -> None:
    assert parse(text) == (text, ())


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none(), max_size=4), st.text())
def test_a_valid_call_keeps_its_arguments_to_the_letter(arguments: dict[str, Any], name: str) -> None:
    written = json.dumps(arguments, indent=1)
    body = f'{{"name": {json.dumps(name)}, "arguments": {written}}}'
    if "</tool_call>" in body:
        return
    assert parse(f"<tool_call>\n{body}\n</tool_call>") == ("", (ToolCall(index=0, name=name, arguments=written),))


def test_parallel_calls_are_counted_and_their_layout_is_not_text() -> None:
    text, calls = parse(f"Two sums.\n{CALL}\n{CALL}\n")
    assert text == "Two sums."
    assert [(call.index, call.name, call.arguments) for call in calls] == [
        (0, "add", '{"a": 1,  "b": [2.0, "x}"]}'),
        (1, "add", '{"a": 1,  "b": [2.0, "x}"]}'),
    ]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "null",
        '{"name": "f"}',
        '{"arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": {"a": 01}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": {}} trailing',
        '{"name": "f", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}",
    ],
)
def test_a_malformed_call_is_returned_as_text(body: str) -> None:
    text = f"Hm. <tool_call>\n{body}\n</tool_call> after"
    assert parse(text) == (text, ())


def test_an_unfinished_call_is_returned_as_text() -> None:
    for length in range(len(CALL)):
        assert parse("x\n" + CALL[:length]) == ("x\n" + CALL[:length], ())


def test_a_good_call_behind_a_malformed_one() -> None:
    bad = "<tool_call>\n{oops}\n</tool_call>"
    text, calls = parse(f"{bad}\n{CALL}")
    assert (text, len(calls), calls[0].index) == (bad, 1, 0)


def test_text_streams_token_by_token() -> None:
    parser = HermesParser()
    events = [parser.feed(piece) for piece in ("The", " answer", " is", " <", "4", " <tool", "_call>", "{}")]
    assert events == [["The"], [" answer"], [" is"], [], [" <4"], [], [], []]


def test_text_that_speaks_of_the_tag_streams_on() -> None:
    parser = HermesParser()
    events = [parser.feed(piece) for piece in ("Write", " <tool_call>", "\n", "and", " then")]
    assert events == [["Write"], [], [], [" <tool_call>\n", "and"], [" then"]]


def test_a_call_behind_a_mention_of_the_tag() -> None:
    text, calls = parse(f"A <tool_call> is made so: {CALL}")
    assert (text, len(calls)) == ("A <tool_call> is made so:", 1)


def test_a_call_is_given_as_soon_as_its_end_tag_is_whole() -> None:
    parser = HermesParser()
    assert parser.feed(CALL[:-1]) == []
    assert [type(event) for event in parser.feed(CALL[-1:])] == [ToolCall]
