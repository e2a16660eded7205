"""Images in the conversations of a model that reads text only: refused, or named where they stood.

The readers of every dialect refuse them. Where the run says so (`run.images`), a body's images become texts before it
is read; what is recorded is what the model was told.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

PLACEHOLDER = "\n[image]\n"

_TEXT_OF = {"image_url": "text", "image": "text", "input_image": "input_text"}
"""Parts that are images, in chat completions, Messages and Responses, and the text parts of the same dialect."""
_MARKS = tuple(f'"{kind}"'.encode() for kind in _TEXT_OF)


def hint(kind: str) -> str:
    """What a refusal of content of this kind says beside."""
    return ' (with run.images = "name" the model is told that there is one)' if kind in _TEXT_OF else ""


def named(raw: bytes) -> tuple[bytes, int]:
    """The body with a text in the place of every image, and how many there were. A body that cannot be read is left
    to its reader, which says what is wrong with it."""
    if not any(mark in raw for mark in _MARKS):
        return raw, 0
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return raw, 0
    count = sum(_name_in(entry) for key in ("messages", "input") for entry in _list_at(body, key))
    return (_encoded(body), count) if count else (raw, 0)


def _name_in(holder: Any) -> int:
    """In the content of a message, the output of a tool."""
    count = 0
    for key in ("content", "output"):
        parts = _list_at(holder, key)
        for index, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in _TEXT_OF:
                parts[index] = {"type": _TEXT_OF[kind], "text": PLACEHOLDER}
                count += 1
            elif kind == "tool_result":
                count += _name_in(part)
    return count


def _list_at(value: Any, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _encoded(body: Any) -> bytes:
    try:
        return msgspec.json.encode(body)
    except OverflowError:  # an integer of more than 64 bits
        return json.dumps(body).encode()
