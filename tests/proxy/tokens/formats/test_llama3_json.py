from __future__ import annotations

import pytest

from proxy.tokens.formats.llama3_json import Llama3JsonParser
from tests.proxy.tokens.pieces import text_and_calls, told

CALL = '{"name": "add", "parameters": {"a": 1,  "b": "x;}"}}'
ARGUMENTS = '{"a": 1,  "b": "x;}"}'


def called(text: str) -> tuple[str, list[tuple[str, str]]]:
    content, calls = text_and_calls(told(Llama3JsonParser(), [text]))
    return content, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"\n {CALL}\n",
        f"<|python_tag|>{CALL}",
        f"<|python_tag|> {CALL};",
        CALL.replace("parameters", "arguments"),
        '{"type": "function", ' + CALL[1:],
        '{"parameters": ' + ARGUMENTS + ', "name": "add"}',
    ],
)
def test_the_answer_is_a_call(text: str) -> None:
    assert called(text) == ("", [("add", ARGUMENTS)])


@pytest.mark.parametrize("between", [";", "; ", "\n", "", ";\n<|python_tag|>", "<|python_tag|>"])
def test_several_calls(between: str) -> None:
    assert called(CALL + between + CALL) == ("", [("add", ARGUMENTS)] * 2)


def test_text_before_a_tag_and_behind_the_calls() -> None:
    content, calls = called(f"I add. <|python_tag|>{CALL}; {CALL} So it is.")
    assert (content, len(calls)) == ("I add. So it is.", 2)
    assert called(f"{CALL}; and")[0] == "; and"


@pytest.mark.parametrize(
    "text",
    [
        f"I would call {CALL}",
        '{"answer": 42}',
        '{"names": 42}',
        '{\n "city": {"name": "f", "parameters": {}}}',
        '<|python_tag|>brave_search.call(query="x")',
        "<|python_tag|>print(1)",
        "[" + CALL + "]",
        '{"name": "f", "parameters": "{}"}',
        '{"name": "f", "parameters": {}]',
    ],
)
def test_text_that_is_not_a_call_stays_text(text: str) -> None:
    assert called(text) == (text, [])


def test_an_answer_in_json_streams() -> None:
    parser = Llama3JsonParser()
    events = [parser.feed(piece) for piece in ('{"', "na", "tion", '": "France', '"}')]
    assert events == [[], [], ["{", '"nation'], ['": "France'], ['"}']]
