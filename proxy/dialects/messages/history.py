"""Convert Anthropic's messages into messages in the shape of chat completions, which chat templates expect.

| Anthropic | chat completions |
| --- | --- |
| `system`, a string or text blocks | the first message, of role system; each block is a line |
| a later system message | a system message, or a user's `<system-reminder>` if the template refuses that |
| text of a user | a user's message; blocks, and consecutive messages, are joined as lines |
| tool_result | a message of role tool, in the order of the calls; `is_error` becomes part of its text |
| text of an assistant | content; pieces of one answer are joined without a separator |
| thinking | reasoning_content |
| tool_use | an element of tool_calls, with its input as JSON text |
| redacted_thinking | dropped: only Anthropic can decrypt it |
| a last message of the assistant | no message, but the beginning of the answer (`prefill`) |

Consecutive messages of one role are one message, as in Anthropic's API: clients may send the blocks of an answer back
in several messages.
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
# The blocks that a message of each role may contain. Images and documents have no place in a text-only prompt.
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}

# Prefix of a system block in which Claude Code reports itself to Anthropic. The block changes with every call, so it
# is dropped: with it, no prompt would begin with the tokens of the previous call.
_CLIENT_MARK = "x-anthropic-billing-header:"


class History(msgspec.Struct, frozen=True, kw_only=True):
    """A converted conversation. `prefill` is the text with which the answer has to begin."""

    messages: list[dict[str, Any]]
    prefill: str = ""


def read_history(
    system: Any,
    messages: list[Any],
    *,
    system_anywhere: bool = True,
    most_parts: int = DEFAULT_BOUNDS.max_parts,
) -> History:
    """Convert a conversation.

    `system_anywhere` is whether the template accepts system messages after the first message. `most_parts` bounds the
    blocks of one message. Raise InvalidRequest with the exact place, or UnsupportedParameter for a block that is not
    supported in its message.
    """
    end = len(messages)  # of the conversation; the assistant's messages from there on are the prefill
    while end and object_at(messages[end - 1], _place(end - 1)).get("role") == "assistant":
        end -= 1
    converted: list[_GrowingMessage] = []
    if system is not None:
        text = "\n".join(text for text in _texts(system, "system") if not text.startswith(_CLIENT_MARK))
        if text:
            converted.append(_GrowingMessage({"role": "system", "content": text}))
    for index, message in enumerate(messages[:end]):
        for part in _read(message, _place(index), most_parts):
            _add(converted, part if system_anywhere else _without_late_system(converted, part))
    if not converted:
        raise InvalidRequest("messages must contain a message of the user", param="messages")
    joined = [message.joined() for message in converted]
    _sort_tool_results(joined)
    return History(messages=joined, prefill=_prefill(messages, end, most_parts))


def _place(index: int) -> str:
    return f"messages[{index}]"


class _GrowingMessage:
    """A message in parts that are joined once, at the end: joining at each part would take quadratic time."""

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


def _add(messages: list[_GrowingMessage], part: dict[str, Any]) -> None:
    """Append `part` to the last message if both have the same role, otherwise as a message of its own.

    Each tool result stays a message of its own.
    """
    if messages and messages[-1].role == part["role"] != "tool":
        messages[-1].add(part)
    else:
        messages.append(_GrowingMessage(part))


def _without_late_system(messages: list[_GrowingMessage], part: dict[str, Any]) -> dict[str, Any]:
    """Turn a system message after the beginning into a user's, in the form that Claude Code uses for such models."""
    if part["role"] != "system" or not messages or messages[-1].role == "system":
        return part
    return {"role": "user", "content": f"<system-reminder>\n{part['content']}\n</system-reminder>"}


def _sort_tool_results(messages: list[dict[str, Any]]) -> None:
    """Sort consecutive tool results in place by the order of their calls; results of unknown calls come last.

    Most templates print no call ids, so the model can only match results to calls by their order.
    """
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls is None:
            continue
        end = start = index + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        # Reversed, so that of calls with the same id the first one counts.
        order = {call["id"]: number for number, call in reversed(list(enumerate(calls)))}
        messages[start:end] = sorted(
            messages[start:end], key=lambda result: order.get(result["tool_call_id"], len(calls))
        )


def _read(value: Any, where: str, most_parts: int) -> Iterator[dict[str, Any]]:
    """Yield the blocks of one message as parts of messages; an empty message has one empty part."""
    message = object_at(value, where)
    role = text_at(message.get("role"), f"{where}.role")
    if role not in _ROLES:
        raise InvalidRequest(f"role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    content = message.get("content")
    if content is None and role == "assistant":  # some clients send an empty answer back as null
        content = ""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise InvalidRequest("content must be text or a list of blocks", param=f"{where}.content")
    check_parts(content, f"{where}.content", most_parts)
    if not content:
        yield {"role": role, "content": ""}
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = _kind(block, place)
        if kind not in _BLOCKS[role]:
            known = ", ".join(_BLOCKS[role])
            raise UnsupportedParameter(
                f"a block of type {kind!r} is not supported here: "
                f"a message of role {role} may contain {known}{hint(kind)}",
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
    # Templates have no field for failed calls, so the text has to tell the model, unless it does already.
    if block.get("is_error") is True and not text.lower().startswith("error"):
        text = f"Error: {text}" if text else "Error"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _prefill(messages: list[Any], start: int, most_parts: int) -> str:
    """Return the text of the messages from `start` on, which are the assistant's.

    Raise InvalidRequest if they contain anything but text, or end with white space.
    """
    texts = []
    for index in range(start, len(messages)):
        for part in _read(messages[index], _place(index), most_parts):
            if set(part) != {"role", "content"}:
                raise InvalidRequest(
                    "a last message of the assistant is continued by the answer, so it must be text without thinking "
                    "or tool_use; send a tool_result after a tool_use",
                    param=f"{_place(index)}.content",
                )
            texts.append(part["content"])
    text = "".join(texts)
    # As in Anthropic's API: the model was trained on tokens that begin with a space, so after one it would continue
    # with unusual tokens.
    if text != text.rstrip():
        raise InvalidRequest(
            "a last message of the assistant must not end with white space",
            param=f"{_place(len(messages) - 1)}.content",
        )
    return text


def _texts(value: Any, where: str) -> list[str]:
    """Return the texts of `value`, which is a string or a list of text blocks."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be text or a list of text blocks", param=where)
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
