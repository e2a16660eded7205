from __future__ import annotations

from collections.abc import Sequence

import pytest

from proxy.turns.answers import answer_message


@pytest.mark.parametrize("response", [{}, {"choices": []}, {"choices": [{"delta": {}}]}, {"choices": "x"}])
def test_an_answer_without_a_message_is_none(response: dict[str, Sequence[object]]) -> None:
    assert answer_message(response) is None


def test_calls_and_reasoning_are_part_of_the_message_and_broken_calls_are_not() -> None:
    call = {"id": "call_1", "call": {"name": "add", "arguments": "{}"}}
    choice = {"text": "Adding.", "reasoning": "Two numbers.", "tool_calls": [call, {"id": "call_2"}]}
    assert answer_message({"choices": [choice]}) == {
        "role": "assistant",
        "content": "Adding.",
        "reasoning_content": "Two numbers.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
    }
