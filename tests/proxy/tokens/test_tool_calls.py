from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.tokens.tool_calls import Event, ToolCall, ToolCallParser, parse

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": [2.0, "x}"]}}\n</tool_call>'
PIECES = st.sampled_from(
    [
        "Let me see. ",
        " \n",
        "<",
        "<tool",
        "<tool_call>",
        "</tool_call>",
        "</tool",
        "é🎉",
        CALL,
        '<tool_call>{"name": "go", "arguments": {}}</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>',
        '{"name": "f", "arguments": {"q": "<tool_call>"}}',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
    ]
)
TEXTS = st.lists(PIECES, max_size=6).map("".join)


def streamed(text: str, cuts: list[int]) -> list[Event]:
    parser = ToolCallParser()
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    events: list[Event] = []
    for a, b in itertools.pairwise(edges):
        events += parser.feed(text[a:b])
    return events + parser.finish()


def collected(events: list[Event]) -> tuple[str, tuple[ToolCall, ...]]:
    text = "".join(event for event in events if isinstance(event, str))
    return text, tuple(event for event in events if isinstance(event, ToolCall))


@given(TEXTS, st.lists(st.integers(0, 300), max_size=20))
@example(CALL + "\n" + CALL, list(range(200)))
def test_any_split_gives_the_same_text_and_calls(text: str, cuts: list[int]) -> None:
    assert collected(streamed(text, cuts)) == parse(text)


@given(TEXTS)
def test_character_by_character(text: str) -> None:
    assert collected(streamed(text, list(range(len(text))))) == parse(text)


@given(st.text(alphabet="ab <>/tool_call\n{}"))
def test_text_without_calls_comes_back_unchanged(text: str) -> None:
    assert parse(text) == (text, ())


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none(), max_size=4), st.text())
def test_a_valid_call_keeps_its_arguments_to_the_letter(arguments: dict[str, Any], name: str) -> None:
    written = json.dumps(arguments, indent=1)
    body = f'{{"name": {json.dumps(name)}, "arguments": {written}}}'
    if "</tool_call>" in body:
        return
    assert parse(f"<tool_call>\n{body}\n</tool_call>") == ("", (ToolCall(index=0, name=name, arguments=written),))


def test_parallel_calls_are_counted_and_their_layout_is_no_text() -> None:
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
def test_a_malformed_call_comes_back_as_text(body: str) -> None:
    text = f"Hm. <tool_call>\n{body}\n</tool_call> after"
    assert parse(text) == (text, ())


def test_an_unfinished_call_comes_back_as_text() -> None:
    for length in range(len(CALL)):
        assert parse("x\n" + CALL[:length]) == ("x\n" + CALL[:length], ())


def test_a_good_call_behind_a_malformed_one() -> None:
    bad = "<tool_call>\n{oops}\n</tool_call>"
    text, calls = parse(f"{bad}\n{CALL}")
    assert (text, len(calls), calls[0].index) == (bad, 1, 0)


def test_text_streams_token_by_token() -> None:
    parser = ToolCallParser()
    events = [parser.feed(piece) for piece in ("The", " answer", " is", " <", "4", " <tool", "_call>", "{}")]
    assert events == [["The"], [" answer"], [" is"], [], [" <4"], [], [], []]


def test_a_call_is_given_as_soon_as_its_end_tag_is_whole() -> None:
    parser = ToolCallParser()
    assert parser.feed(CALL[:-1]) == []
    assert [type(event) for event in parser.feed(CALL[-1:])] == [ToolCall]
