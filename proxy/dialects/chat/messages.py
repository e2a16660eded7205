"""Check the messages of chat completions one by one, so that every error names its exact place.

OpenAI deprecated `function_call` and role `function` in favour of `tool_calls` and role `tool`. The deprecated form
is converted, since chat templates only know the current one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from proxy.calls.bounds import DEFAULT_BOUNDS, check_parts
from proxy.calls.images import hint
from proxy.dialects.fields import decode_element, list_at, object_at, plain, text_at
from proxy.errors import InvalidRequest, UnsupportedParameter

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "refusal")
_USUAL_FIELDS = frozenset({"role", "content"})


def read_message(raw: msgspec.Raw, position: int, *, most_parts: int = DEFAULT_BOUNDS.max_parts) -> dict[str, Any]:
    """Decode and check the message at `position`, which may have at most `most_parts` content parts or tool calls.

    Raise InvalidRequest, or UnsupportedParameter if the message holds anything but text.
    """
    where = f"messages[{position}]"
    return _message(decode_element(raw, where), where, most_parts)


def _message(value: Any, where: str, most_parts: int) -> dict[str, Any]:
    message = object_at(value, where)
    role = text_at(message.get("role"), f"{where}.role")
    if role not in _ROLES:
        raise InvalidRequest(f"role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        _check_parts(content, f"{where}.content", most_parts)
    if content is None and role not in ("assistant", "function"):
        raise InvalidRequest(f"a message of role {role} must have content", param=f"{where}.content")
    if role != "function" and _USUAL_FIELDS.issuperset(message):  # nearly all messages: nothing is left to check
        return message
    if role != "assistant":
        for key in ("tool_calls", "function_call"):
            if message.get(key) is not None:
                raise InvalidRequest(f"only assistant messages may have {key}", param=f"{where}.{key}")
    if message.get("tool_calls") is not None:
        _check_calls(message["tool_calls"], f"{where}.tool_calls", most_parts)
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            text_at(message[key], f"{where}.{key}")
    return _without_deprecated_fields(message, where)


def _without_deprecated_fields(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the message with a deprecated function call, or the result of one, in the current form."""
    if message["role"] == "function":
        text_at(message.get("name"), f"{where}.name")
        return {**message, "role": "tool", "content": message.get("content") or ""}
    function = message.get("function_call")
    if function is None:
        return message
    if message.get("tool_calls"):
        raise InvalidRequest(
            "function_call is the deprecated form of tool_calls: send only one of them",
            param=f"{where}.function_call",
        )
    call = {"type": "function", "function": function}
    _check_function(function, f"{where}.function_call")
    return {key: item for key, item in message.items() if key != "function_call"} | {"tool_calls": [call]}


def _check_parts(parts: Any, where: str, most: int) -> None:
    if not isinstance(parts, list):
        raise InvalidRequest("content must be text, a list of parts, or null", param=where)
    check_parts(parts, where, most)
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        kind = text_at(object_at(part, place).get("type"), f"{place}.type")
        if kind not in _TEXT_PARTS:
            raise UnsupportedParameter(
                f"content of type {plain(kind)} is not supported: text only{hint(kind)}", param=f"{place}.type"
            )
        text_at(part.get(kind), f"{place}.{kind}")


def _check_calls(calls: Any, where: str, most: int) -> None:
    check_parts(list_at(calls, where), where, most)
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        kind = object_at(call, place).get("type")
        if kind not in (None, "function"):
            raise UnsupportedParameter("only tool calls of type function are supported", param=f"{place}.type")
        _check_function(call.get("function"), f"{place}.function")
        if call.get("id") is not None:
            text_at(call["id"], f"{place}.id")


def _check_function(value: Any, where: str) -> None:
    function = object_at(value, where)
    text_at(function.get("name"), f"{where}.name")
    if function.get("arguments") is not None:
        text_at(function["arguments"], f"{where}.arguments")
