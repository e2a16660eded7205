"""Properties that hold for every tool-call format."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.tokens.formats import TOOL_FORMATS, ToolCall
from proxy.tokens.output import OutputFormat, OutputParser
from tests.proxy.tokens.pieces import cut, text_and_calls, told

FORMATS = st.sampled_from(sorted(TOOL_FORMATS))
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "}]"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n}]\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {"a": "}]"}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "}]"}',
}
PIECES = st.sampled_from(
    [
        *CALLS.values(),
        *(text[:-1] for text in CALLS.values()),
        *(text[: len(text) // 2] for text in CALLS.values()),
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": [1]}}]',
        '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": "}]"}',
        "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n",
        '{"name": "f", "parameters": {"a": "\\"{"}}',
        '{"answer": 42}',
        "Let me see. ",
        " \n",
        ";",
        "<",
        "<tool",
        "[TOOL",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "<function=",
        "</parameter>",
        "<think>",
        "</think>",
        "é🎉",
        "\\",
        '"',
        "{",
        "]",
    ]
)
TEXTS = st.lists(PIECES, max_size=7).map("".join)
MARKUP = st.text(alphabet='<>/|[]{}=";,: \n\\aftoolcpyhn_TOLCAS', max_size=60)
CUTS = st.lists(st.integers(0, 300), max_size=20)
ABSURD = [
    '{"name": "f", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}",
    '{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    '{"name": "f", "arguments": {"a": 1e999}}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": -Infinity}}',
    '{"name": "f", "arguments": {"a": "\\ud800"}}',
    '{"name": "f", "arguments": {"a": "\ud800"}}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": null}',
    '{"name": null, "arguments": {}}',
    '{"name": "f"}',
    '{"arguments": {}}',
    '{"name": "f", "arguments": {"a": 01}}',
    "{",
    "[]",
    "",
]
WRITTEN = {
    "hermes": "<tool_call>\n{}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={}>\n</tool_call>",
    "llama3_json": "<|python_tag|>{}",
    "mistral": "[TOOL_CALLS] [{}]",
}


def parser(name: str, *, reasoning: bool = False, in_reasoning: bool = False) -> OutputParser:
    form = OutputFormat(tool_format=TOOL_FORMATS[name], reasoning=reasoning)
    return form.start(calls_allowed=True, in_reasoning=in_reasoning)


@given(FORMATS, TEXTS | MARKUP, CUTS, st.booleans(), st.booleans())
@example("hermes", CALLS["hermes"] * 2, list(range(200)), False, False)
@example("llama3_json", CALLS["llama3_json"] * 2, list(range(200)), False, False)
def test_any_split_tells_the_same(name: str, text: str, cuts: list[int], reasoning: bool, inside: bool) -> None:
    whole = told(parser(name, reasoning=reasoning, in_reasoning=inside), [text])
    assert told(parser(name, reasoning=reasoning, in_reasoning=inside), cut(text, cuts)) == whole
    assert told(parser(name, reasoning=reasoning, in_reasoning=inside), list(text)) == whole


@given(FORMATS, TEXTS | MARKUP | st.text())
def test_without_calls_the_text_is_returned_unchanged(name: str, text: str) -> None:
    content, calls = text_and_calls(told(parser(name), [text]))
    if not calls:
        assert content == text


@given(FORMATS, TEXTS | MARKUP | st.text())
def test_without_allowed_calls_everything_is_text(name: str, text: str) -> None:
    form = OutputFormat(tool_format=TOOL_FORMATS[name])
    assert told(form.start(calls_allowed=False), [text]) == ([text] if text else [])


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_counted_and_their_layout_is_not_text(name: str) -> None:
    content, calls = text_and_calls(told(parser(name), [f"Two.\n{CALLS[name]}\n{CALLS[name]}\n"]))
    assert content == "Two."
    assert calls == [ToolCall(index=index, name="f", arguments='{"a": "}]"}') for index in (0, 1)]


@pytest.mark.parametrize("name", CALLS)
def test_an_unfinished_call_is_text(name: str) -> None:
    end = CALLS[name].find("</function>") + len("</function>") if name == "qwen3_coder" else len(CALLS[name])
    for length in range(end):
        text = "x\n" + CALLS[name][:length]
        assert told(parser(name), [text]) == [text]


@pytest.mark.parametrize("body", ABSURD, ids=range(len(ABSURD)))
@pytest.mark.parametrize("name", CALLS)
def test_a_malformed_call_is_the_text_that_it_is(name: str, body: str) -> None:
    text = "Hm. " + WRITTEN[name].replace("{}", body)
    assert told(parser(name), [text]) == [text]
    assert told(parser(name), cut(text, list(range(0, len(text), 1000)))) == [text]


@pytest.mark.parametrize("body", ABSURD, ids=range(len(ABSURD)))
def test_a_malformed_answer_of_json_alone_is_text(body: str) -> None:
    assert told(parser("llama3_json"), [body]) == ([body] if body else [])


@pytest.mark.parametrize("name", CALLS)
def test_a_key_that_comes_twice_is_no_fault(name: str) -> None:
    twice = CALLS[name].replace('"a": "}]"', '"a": 1, "a": 2')
    twice = twice.replace("<parameter=a>", "<parameter=a>\n1\n</parameter>\n<parameter=a>")
    assert len(text_and_calls(told(parser(name), [twice]))[1]) == 1


@pytest.mark.parametrize("name", CALLS)
def test_a_good_call_behind_a_malformed_one(name: str) -> None:
    bad = WRITTEN[name].replace("{}", '{"name": "f"}')
    content, calls = text_and_calls(told(parser(name), [f"{bad}\n{CALLS[name]}"]))
    assert (content, [call.index for call in calls]) == (bad, [0])


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_reported_as_soon_as_it_is_complete(name: str) -> None:
    started, call = parser(name), CALLS[name]
    end = call.find("</function>") + len("</function>") if name == "qwen3_coder" else len(call)
    assert started.feed(call[: end - 1]) == []
    assert [type(event) for event in started.feed(call[end - 1 : end])] == [ToolCall]


HELD = {
    "hermes": '<tool_call>{"',
    "qwen3_coder": "<function=f><parameter=a>",
    "llama3_json": '{"name": "',
    "mistral": '[TOOL_CALLS]f[ARGS]{"',
}


@pytest.mark.parametrize(
    ("name", "beginning", "rest"),
    [("hermes", HELD["hermes"], "x"), ("mistral", HELD["mistral"], "x"), ("hermes", "", " ")],
)
def test_a_million_characters_one_by_one_take_linear_time(name: str, beginning: str, rest: str) -> None:
    """Copying or searching all buffered text with every piece would take minutes."""
    told_in = parser(name)
    begun = time.process_time()
    for piece in beginning + rest * 1_000_000:
        told_in.feed(piece)
    told_in.finish()
    assert time.process_time() - begun < 40


@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<tool_call>{", "[TOOL_CALLS]", "<function=a>", "</parameter> ", '{"name":']
)
@pytest.mark.parametrize("name", CALLS)
def test_an_answer_full_of_markers_takes_linear_time(name: str, unit: str) -> None:
    text = HELD[name] + unit * (1_000_000 // len(unit))
    begun = time.process_time()
    assert told(parser(name), [text]) == [text]
    assert time.process_time() - begun < 6
