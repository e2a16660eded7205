"""Recorded answers as messages in the form of chat completions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def answer_message(response: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the answer of a recorded response as an assistant message, or None if the call has no answer."""
    match response:
        case {"choices": [{"text": str(text)} as choice, *_]}:
            message: dict[str, Any] = {"role": "assistant", "content": text}
        case _:
            return None
    if choice.get("reasoning"):
        message["reasoning_content"] = choice["reasoning"]
    # Imported responses may hold anything, so a call without its fields is shown without them.
    calls = [_call(made) for made in choice.get("tool_calls") or () if "call" in made]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(made: Mapping[str, Any]) -> dict[str, Any]:
    call = made["call"]
    function = {"name": call.get("name"), "arguments": call.get("arguments")}
    return {"id": made.get("id"), "type": "function", "function": function}
