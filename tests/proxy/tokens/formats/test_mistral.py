from __future__ import annotations

import pytest

from proxy.tokens.formats.mistral import MistralParser
from tests.proxy.tokens.pieces import text_and_calls, told

LIST = '[{"name": "add", "arguments": {"a": "]"}, "id": "abc123XYZ"}, {"name": "go", "arguments": {}}]'


def called(text: str) -> tuple[str, list[tuple[str, str]]]:
    content, calls = text_and_calls(told(MistralParser(), [text]))
    return content, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("before", ["", "Both.\n"])
@pytest.mark.parametrize("between", ["", " ", "\n"])
def test_a_list_of_calls(before: str, between: str) -> None:
    assert called(f"{before}[TOOL_CALLS]{between}{LIST}") == (before.strip(), [("add", '{"a": "]"}'), ("go", "{}")])


@pytest.mark.parametrize(
    "written",
    [
        '[TOOL_CALLS]add[ARGS]{"a": "]"}',
        '[TOOL_CALLS]add[ARGS] {"a": "]"}',
        '[TOOL_CALLS] add[CALL_ID]abc123XYZ[ARGS]{"a": "]"}',
        '[TOOL_CALLS]add{"a": "]"}',
        '[TOOL_CALLS]add[CALL_ID]abc123XYZ{"a": "]"}',
        '[TOOL_CALLS]{"name": "add", "arguments": {"a": "]"}}',
    ],
)
def test_a_call_with_a_marker_of_its_own(written: str) -> None:
    assert called(written) == ("", [("add", '{"a": "]"}')])
    assert called(f"{written}{written}\nSo.") == ("\nSo.", [("add", '{"a": "]"}')] * 2)


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] is a marker",
        "[TOOL_CALLS][TOOL_CALLS]",
        "[TOOL_CALLS][1]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]add[ARGS][1]",
        "[TOOL_CALLS]add[ARGS]{1}",
        "[TOOL_CALLS]add[CALL_ID][ARG",
        "[TOOL_CALLS]add[CALL_ID]id id[ARGS]{}",
        "[TOOL_CALLS][ARGS]{}",
        "[TOOL_CALLS]" + "a" * 300 + "[ARGS]{}",
        '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "go"}]',
    ],
)
def test_a_malformed_call_is_text(text: str) -> None:
    assert called("Hm. " + text) == ("Hm. " + text, [])


def test_a_call_behind_a_marker_alone() -> None:
    assert called("[TOOL_CALLS][TOOL_CALLS]go[ARGS]{}") == ("[TOOL_CALLS]", [("go", "{}")])
