from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.calls.conversation import ConversationIndex, ReadConversation, WireMessages, without_reminder
from proxy.errors import InvalidRequest
from proxy.tokens.canonical import EMPTY, conversation_hashes

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.builds(lambda role, text: {"role": role, "content": text}, ROLES, st.text(max_size=3))


class Wire:
    """Messages as they arrive, and which of them were parsed."""

    def __init__(self, messages: list[dict[str, Any]], *, indent: int | None = None) -> None:
        encoded = json.dumps(messages, indent=indent).encode()
        self.looked_at: list[int] = []
        self.messages = WireMessages(msgspec.json.decode(encoded, type=list[msgspec.Raw]), self._read)

    def _read(self, raw: msgspec.Raw, position: int) -> dict[str, Any]:
        self.looked_at.append(position)
        message: dict[str, Any] = msgspec.json.decode(raw)
        if message["role"] not in ("system", "user", "assistant", "tool"):
            raise InvalidRequest("no such role", param=f"messages[{position}].role")
        return message


def talk(turns: int) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": "first"}]
    for number in range(turns):
        messages += [{"role": "assistant", "content": f"said {number}"}, {"role": "user", "content": f"and {number}"}]
    return messages


def same(read: ReadConversation, messages: list[dict[str, Any]]) -> None:
    hashes = conversation_hashes(messages)
    assert read.hash == hashes[-1]
    answered = [digest for message, digest in zip(messages, hashes, strict=True) if message["role"] == "assistant"]
    assert list(read.answered) == answered[::-1]
    for digest in answered:
        assert read.length_at(digest) == hashes.index(digest) + 1


@given(st.lists(MESSAGES, min_size=1, max_size=8), st.data())
def test_recognised_or_not_a_conversation_has_the_same_hashes(messages: list[dict[str, Any]], data: Any) -> None:
    index = ConversationIndex()
    for _ in range(3):
        read = index.read(Wire(messages, indent=data.draw(st.sampled_from([None, 1]))).messages)
        same(read, messages)
        same(index.read(messages), messages)
        index.keep(read)
        messages = messages[: data.draw(st.integers(1, len(messages)))] + data.draw(st.lists(MESSAGES, max_size=3))


@pytest.mark.parametrize("turns", [0, 1, 50])
def test_only_the_new_messages_of_a_continued_conversation_are_read(turns: int) -> None:
    index = ConversationIndex()
    index.keep(index.read(Wire(talk(turns)).messages))
    wire = Wire(talk(turns + 1))
    read = index.read(wire.messages)
    assert sorted(wire.looked_at) == [2 * turns + 1, 2 * turns + 2]
    same(read, talk(turns + 1))


@pytest.mark.parametrize("changed", [0, 50, 99])
def test_a_changed_message_is_noticed_at_every_position(changed: int) -> None:
    index = ConversationIndex()
    index.keep(index.read(Wire(talk(50)).messages))
    messages = talk(51)
    messages[changed] = {**messages[changed], "content": "something else"}
    wire = Wire(messages)
    same(index.read(wire.messages), messages)
    assert len(wire.looked_at) == len(messages)


def test_every_message_is_checked_unless_it_was_in_these_very_bytes() -> None:
    index = ConversationIndex()
    index.keep(index.read(Wire(talk(3)).messages))
    for position in range(9):
        messages = talk(4)
        messages[position] = {"role": "nobody", "content": ""}
        with pytest.raises(InvalidRequest) as refused:
            index.read(Wire(messages).messages)
        assert refused.value.param == f"messages[{position}].role"


def test_reasoning_in_the_past_is_remembered() -> None:
    index = ConversationIndex()
    thought = [*talk(1), {"role": "assistant", "content": "<think>hm</think>yes"}, {"role": "user", "content": "?"}]
    index.keep(index.read(Wire(thought).messages))
    more = [*thought, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "!"}]
    assert not index.read(Wire(more).messages).plain
    assert index.read(Wire(talk(3)).messages).plain


def test_the_cache_is_bounded() -> None:
    index = ConversationIndex(most=2)
    for turns in (1, 2, 3):
        index.keep(index.read(Wire([{"role": "system", "content": str(turns)}, *talk(turns)]).messages))
    wire = Wire([{"role": "system", "content": "1"}, *talk(2)])
    index.read(wire.messages)
    assert len(wire.looked_at) == 6


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("task\n<system-reminder>\nBe brief.\n</system-reminder>\n", "task"),
        ("a <b>c</b> d\n\n<env>x</env>", "a <b>c</b> d"),
        ([{"type": "text", "text": "task"}, {"type": "text", "text": "Be brief."}], "task"),
        ([{"type": "text", "text": "task"}], None),
        ("task", None),
        ("<all>of it</all>", None),
        ("no beginning</end>", None),
        ("a < b > c", None),
        ("", None),
        (None, None),
    ],
)
def test_the_reminder_at_the_end_of_a_message(content: Any, text: str | None) -> None:
    assert without_reminder({"role": "user", "content": content}) == text
    assert without_reminder({"role": "system", "content": content}) is None


@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_a_lone_message_is_a_users_behind_system_messages(messages: list[dict[str, Any]]) -> None:
    index = ConversationIndex()
    roles = [message["role"] for message in messages]
    expected = None
    if roles[-1] == "user" and set(roles[:-1]) <= {"system"}:
        before = conversation_hashes(messages[:-1])[-1] if len(messages) > 1 else EMPTY
        expected = (before, messages[-1]["content"])
    for _ in range(2):
        read = index.read(Wire(messages).messages)
        assert read.lone_message == expected
        index.keep(read)


def test_a_lone_message_is_text() -> None:
    def lone(*parts: dict[str, Any]) -> tuple[bytes, str] | None:
        return ConversationIndex().read([{"role": "user", "content": list(parts)}]).lone_message

    text = {"type": "text", "text": "a"}
    assert lone(text, text) == (EMPTY, "aa")
    assert lone(text, {"type": "image_url", "image_url": {"url": "data:,"}}) is None
