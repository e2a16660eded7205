"""Messages in the shape that chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

Message = Mapping[str, Any]
"""`role`, `content` (text), `tool_calls`, … in the OpenAI shape, without nulls (`canonical.normalise`)."""

_SHORT_ID = 9
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def prepared(messages: Sequence[Message], *, short_ids: bool) -> list[Message]:
    """Return the messages with tool arguments as objects; clients send them as JSON text.

    With `short_ids` the ids of calls have the nine letters and digits that Mistral's templates insist on.
    """
    changed = [
        _map_calls(message, short_ids=short_ids) if message.get("tool_calls") else message for message in messages
    ]
    return [_map_answered(message) for message in changed] if short_ids else changed


def _map_calls(message: Message, *, short_ids: bool) -> Message:
    calls = []
    for call in cast("Sequence[Mapping[str, Any]]", message["tool_calls"]):
        function = dict(call["function"])
        function["arguments"] = _object_or_text(function.get("arguments"))
        plain = {**call, "function": function}
        if short_ids and "id" in call:
            plain["id"] = _short_id(call["id"])
        calls.append(plain)
    return {**message, "tool_calls": calls}


def _map_answered(message: Message) -> Message:
    if "tool_call_id" not in message:
        return message
    return {**message, "tool_call_id": _short_id(message["tool_call_id"])}


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits: a fitting id unchanged, otherwise one derived from it."""
    if len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode(), digest_size=_SHORT_ID).hexdigest()[:_SHORT_ID]


def _object_or_text(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
        if _SURROGATE.search(arguments):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # tokenizers refuse lone surrogates, which raise a ValueError here
        return arguments
    return value if isinstance(value, dict) else arguments
