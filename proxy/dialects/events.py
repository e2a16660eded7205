"""Server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment: it keeps the connection alive, and clients pass it over."""


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event with `value` as JSON; with `name` as its type, where the dialect names its events."""
    data = b"data: " + msgspec.json.encode(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data
