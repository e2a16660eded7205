from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tokens.formats.qwen3_coder import Qwen3CoderParser
from tests.proxy.tokens.pieces import text_and_calls, told

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "line": {"type": "integer"},
                    "dry": {"type": "boolean"},
                    "marks": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
    }
]


def called(text: str, tools: list[dict[str, Any]] | None = TOOLS) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = text_and_calls(told(Qwen3CoderParser(tools), [text]))
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def function(*parameters: str, name: str = "edit") -> str:
    return f"<function={name}>\n{''.join(parameters)}</function>"


def test_values_are_converted_to_the_types_in_the_tools_schema() -> None:
    body = function(
        parameter("path", "12"), parameter("line", "12"), parameter("dry", "True"), parameter("marks", '["é", "b"]')
    )
    expected = {"path": "12", "line": 12, "dry": True, "marks": ["é", "b"]}
    assert called(f"<tool_call>\n{body}\n</tool_call>") == ("", [("edit", expected)])


@pytest.mark.parametrize(
    "tools", [None, [], [{"type": "function", "function": {"name": "other"}}], [{"function": 3}]]
)
def test_values_of_unknown_tools_are_text(tools: Any) -> None:
    assert called(function(parameter("line", "12")), tools)[1] == [("edit", {"line": "12"})]


@pytest.mark.parametrize(
    "written",
    [
        "<tool_call>\n{}\n</tool_call>",
        "<tool_call>{}</tool_call>",
        "{}\n</tool_call>",
        "{}",
        "<tool_call>\n{}\n",
    ],
)
def test_the_outer_tags_are_layout(written: str) -> None:
    """Qwen3-Coder often leaves out the first one."""
    text = "I edit.\n\n" + written.replace("{}", function(parameter("line", "3")))
    assert called(text) == ("I edit.", [("edit", {"line": 3})])
    assert called(text + "\nDone.")[0].endswith("\nDone.")


def test_two_functions_between_one_pair_of_outer_tags() -> None:
    both = f"<tool_call>\n{function(parameter('line', '1'))}\n{function(parameter('line', '2'))}\n</tool_call>"
    assert called(both) == ("", [("edit", {"line": 1}), ("edit", {"line": 2})])


def test_a_function_without_parameters() -> None:
    assert called("<tool_call><function=edit></function></tool_call>") == ("", [("edit", {})])


def test_an_outer_end_tag_behind_no_call_is_text() -> None:
    assert called("so </tool_call> it is") == ("so </tool_call> it is", [])


@given(st.text(alphabet="</parameter>function=ab\n ", max_size=40) | st.text())
def test_a_value_may_contain_any_text_that_does_not_end_it(value: str) -> None:
    inside = f"{value}\n</parameter>\n"
    ends_early = any(
        inside[place + len("</parameter>") :].lstrip().startswith(("<parameter=", "</function>"))
        for place in range(len(value) + 1)
        if inside.startswith("</parameter>", place)
    )
    if not ends_early:
        assert called(function(parameter("path", value))) == ("", [("edit", {"path": value})])


def test_one_line_break_on_either_side_of_a_value_is_layout() -> None:
    assert called(function("<parameter=path>\n\n a \n\n</parameter>"))[1] == [("edit", {"path": "\n a \n"})]
    assert called(function("<parameter=path>a</parameter>"))[1] == [("edit", {"path": "a"})]


def test_the_last_of_repeated_parameters_counts() -> None:
    assert called(function(parameter("line", "1"), parameter("line", "2")))[1] == [("edit", {"line": 2})]


@pytest.mark.parametrize(
    "text",
    [
        "<function=>\n</function>",
        "<function=a b>\n</function>",
        "<function=f>\nline 3\n</function>",
        "<function=f>\n<parameter=>\n1\n</parameter>\n</function>",
        "<function=f>\n<parameter=a\n1\n</parameter>\n</function>",
        "<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
        "<function=" + "f" * 300 + ">\n</function>",
        '<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>',
        "<function=f>\n<parameter=a>\n\ud800\n</parameter>\n</function>",
    ],
)
def test_a_malformed_call_is_text(text: str) -> None:
    assert called("Hm. " + text) == ("Hm. " + text, [])
