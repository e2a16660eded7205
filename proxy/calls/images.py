"""Images in requests to a model that reads text only: refused, or replaced by a text.

The parsers of all dialects refuse images. With `run.images = "name"`, each image of a body is replaced by a text
before the body is parsed, and the request is recorded with that text.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

PLACEHOLDER = "\n[image]\n"

# The types of image parts in chat completions, Messages and Responses, and the text part of the same dialect.
_TEXT_OF = {"image_url": "text", "image": "text", "input_image": "input_text"}
_MARKS = tuple(f'"{kind}"'.encode() for kind in _TEXT_OF)


def hint(kind: str) -> str:
    """Return the advice that a refusal of this type of content adds, if there is any."""
    return ' (with run.images = "name" the model is told that there is one)' if kind in _TEXT_OF else ""


def named(raw: bytes) -> tuple[bytes, int]:
    """Return the body with every image replaced by a text, and the number of images. A body that cannot be decoded is
    returned as it is: the dialect's parser reports what is wrong."""
    if not any(mark in raw for mark in _MARKS):  # saves decoding almost every body twice
        return raw, 0
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return raw, 0
    count = sum(_name_in(entry) for key in ("messages", "input") for entry in _list_at(body, key))
    return (_encoded(body), count) if count else (raw, 0)


def _name_in(holder: Any) -> int:
    """Replace the images in the content of a message or the output of a tool, in place, and return their number."""
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
