"""Anthropic's messages as those of chat completions, which templates write. The one place where that is decided.

| Anthropic | here |
| --- | --- |
| `system`, a string or text blocks | the first message, of role system; blocks are lines of their own |
| a system message in between | the same, where it stands; a user's `<system-reminder>` where templates refuse it |
| text of a user | a user's message; blocks, and messages that follow each other, are lines of their own |
| tool_result | a message of role tool, in the order of the calls; `is_error` is said in its text |
| text of an assistant | content: pieces of one answer, joined as they are |
| thinking | reasoning_content |
| tool_use | one of tool_calls, its input as JSON text |
| redacted_thinking | nothing: only who sealed it can read it |
| a last message of the assistant | no message: the beginning of the answer (`prefill`) |

Messages of one role that follow each other are one turn, as in Anthropic's API: clients send an answer's blocks back
in as many messages as they like.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from proxy.calls.bounds import DEFAULT_BOUNDS, check_parts
from proxy.calls.images import hint
from proxy.dialects.fields import object_at, text_at
from proxy.errors import InvalidRequest, UnsupportedParameter

_ROLES = ("user", "assistant", "system")
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_CLIENT_MARK = "x-anthropic-billing-header:"
"""A system block of Claude Code that tells Anthropic of the client. It changes with every call, so that no call would
extend the one before."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What was said, and how the answer is to begin."""

    messages: list[dict[str, Any]]
    prefill: str = ""


def read_history(
    system: Any,
    messages: list[Any],
    *,
    system_anywhere: bool = True,
    most_parts: int = DEFAULT_BOUNDS.max_parts,
) -> History:
    """Convert a conversation. `system_anywhere`: the template takes messages of role system behind the first.
    `most_parts` bounds the blocks of one message. Raises InvalidRequest that names the place, UnsupportedParameter
    for blocks that are not text."""
    end = len(messages)
    while end and object_at(messages[end - 1], _place(end - 1)).get("role") == "assistant":
        end -= 1
    said: list[_Growing] = []
    if system is not None:
        text = "\n".join(text for text in _texts(system, "system") if not text.startswith(_CLIENT_MARK))
        if text:
            said.append(_Growing({"role": "system", "content": text}))
    for index, message in enumerate(messages[:end]):
        for part in _read(message, _place(index), most_parts):
            _add(said, part if system_anywhere else _where_templates_take_it(said, part))
    if not said:
        raise InvalidRequest("there is nothing to answer: the first message is the user's", param="messages")
    joined = [message.joined() for message in said]
    _order_results(joined)
    return History(messages=joined, prefill=_prefill(messages, end, most_parts))


def _place(index: int) -> str:
    return f"messages[{index}]"


class _Growing:
    """A message made of parts, joined once at the end: joining them one by one takes time by the square of their
    number."""

    def __init__(self, part: dict[str, Any]) -> None:
        self.role: str = part["role"]
        self._parts = [part]

    def add(self, part: dict[str, Any]) -> None:
        self._parts.append(part)

    def joined(self) -> dict[str, Any]:
        if len(self._parts) == 1:
            return self._parts[0]
        texts = [part["content"] for part in self._parts]
        if self.role != "assistant":
            return {"role": self.role, "content": "\n".join(filter(None, texts))}
        message: dict[str, Any] = {"role": self.role, "content": "".join(texts)}
        thoughts = [part["reasoning_content"] for part in self._parts if "reasoning_content" in part]
        calls = [call for part in self._parts for call in part.get("tool_calls", ())]
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message


def _add(said: list[_Growing], part: dict[str, Any]) -> None:
    """Add `part` as a message, or to the last one where that is of the same role."""
    if said and said[-1].role == part["role"] != "tool":
        said[-1].add(part)
    else:
        said.append(_Growing(part))


def _where_templates_take_it(said: list[_Growing], part: dict[str, Any]) -> dict[str, Any]:
    """A system message behind the beginning as Claude Code writes one to models that know none."""
    if part["role"] != "system" or not said or said[-1].role == "system":
        return part
    return {"role": "user", "content": f"<system-reminder>\n{part['content']}\n</system-reminder>"}


def _order_results(said: list[dict[str, Any]]) -> None:
    """Results that follow each other in the order of the calls that they answer, others behind them: most templates
    write no ids, so the order alone says which is which."""
    for index, message in enumerate(said):
        calls = message.get("tool_calls")
        if calls is None:
            continue
        end = start = index + 1
        while end < len(said) and said[end]["role"] == "tool":
            end += 1
        order = {call["id"]: number for number, call in reversed(list(enumerate(calls)))}
        said[start:end] = sorted(said[start:end], key=lambda result: order.get(result["tool_call_id"], len(calls)))


def _read(value: Any, where: str, most_parts: int) -> Iterator[dict[str, Any]]:
    """Yield the parts of one message, each of one role; an empty message has one."""
    message = object_at(value, where)
    role = text_at(message.get("role"), f"{where}.role")
    if role not in _ROLES:
        raise InvalidRequest(f"role is one of {', '.join(_ROLES)}", param=f"{where}.role")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise InvalidRequest("content is text or a list of blocks", param=f"{where}.content")
    check_parts(content, f"{where}.content", most_parts)
    if not content:
        yield {"role": role, "content": ""}
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = _kind(block, place)
        if kind not in _BLOCKS[role]:
            known = ", ".join(_BLOCKS[role])
            raise UnsupportedParameter(
                f"a block of type {kind!r} is not supported here: a message of role {role} holds {known}{hint(kind)}",
                param=f"{place}.type",
            )
        yield _block(role, kind, block, place)


def _block(role: str, kind: str, block: dict[str, Any], where: str) -> dict[str, Any]:
    if kind == "text":
        return {"role": role, "content": text_at(block.get("text"), f"{where}.text")}
    if kind == "tool_result":
        return _tool_message(block, where)
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    if kind == "tool_use":
        answer["tool_calls"] = [_call(block, where)]
    elif kind == "thinking" and (thought := text_at(block.get("thinking"), f"{where}.thinking")):
        answer["reasoning_content"] = thought
    return answer


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name = text_at(block.get("name"), f"{where}.name")
    given = block.get("input")
    arguments = object_at(given, f"{where}.input") if given is not None else {}
    try:
        text = msgspec.json.encode(arguments).decode()
    except RecursionError as error:
        raise InvalidRequest("the input is nested too deeply", param=f"{where}.input") from error
    call_id = text_at(block.get("id"), f"{where}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _tool_message(block: dict[str, Any], where: str) -> dict[str, Any]:
    call_id = text_at(block.get("tool_use_id"), f"{where}.tool_use_id")
    content = block.get("content")
    text = "" if content is None else "\n".join(_texts(content, f"{where}.content"))
    if block.get("is_error") is True and not text.lower().startswith("error"):
        text = f"Error: {text}" if text else "Error"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _prefill(messages: list[Any], start: int, most_parts: int) -> str:
    """The text of the assistant's messages at the end, from `start` on. Raises InvalidRequest for other parts."""
    texts = []
    for index in range(start, len(messages)):
        for part in _read(messages[index], _place(index), most_parts):
            if set(part) != {"role", "content"}:
                raise InvalidRequest(
                    "the last message is the assistant's, so the answer goes on from it: it is text, without "
                    "thinking and without tool_use, which a tool_result has to follow",
                    param=f"{_place(index)}.content",
                )
            texts.append(part["content"])
    text = "".join(texts)
    if text != text.rstrip():
        raise InvalidRequest(
            "a last message of the assistant does not end with white space",
            param=f"{_place(len(messages) - 1)}.content",
        )
    return text


def _texts(value: Any, where: str) -> list[str]:
    """A string, or the texts of text blocks."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} is text or a list of text blocks", param=where)
    texts = []
    for index, block in enumerate(value):
        place = f"{where}[{index}]"
        kind = _kind(block, place)
        if kind != "text":
            raise UnsupportedParameter(
                f"a block of type {kind!r} is not supported: text only{hint(kind)}", param=f"{place}.type"
            )
        texts.append(text_at(block.get("text"), f"{place}.text"))
    return texts


def _kind(block: Any, where: str) -> str:
    return text_at(object_at(block, where).get("type"), f"{where}.type")
