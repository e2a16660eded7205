"""Server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment: it keeps the connection alive, and clients ignore it."""


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return one event with `value` as JSON. `name` is its type, in dialects that name their events."""
    data = b"data: " + msgspec.json.encode(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data
