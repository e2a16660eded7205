from __future__ import annotations

from typing import Any

import pytest

from proxy.turns.first_messages import first_message_hash

QUESTION = {"role": "user", "content": "What is 2 + 3?"}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "It is Monday."}, QUESTION],
        [{"role": "system", "content": "It is Tuesday."}, QUESTION, {"role": "user", "content": "And 3 + 4?"}],
        [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?\n"}]}],
    ],
)
def test_sessions_with_the_same_question_are_alike(messages: list[dict[str, Any]]) -> None:
    assert first_message_hash(messages) == first_message_hash([QUESTION])


def test_questions_that_differ_are_not_alike() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,a"}}
    other = {"type": "image_url", "image_url": {"url": "data:,b"}}
    text = {"type": "text", "text": "What is 2 + 3?"}
    hashes = {
        first_message_hash([{"role": "user", "content": content}])
        for content in ("What is 2 + 3?", "what is 2 + 3?", [text, image], [text, other])
    }
    assert len(hashes) == 4


@pytest.mark.parametrize("content", [None, "", "  \n", []])
def test_an_empty_message_has_no_hash(content: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert first_message_hash([system, {"role": "user", "content": content}]) is None
    assert first_message_hash([]) is None
