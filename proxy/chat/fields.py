"""Fields of request bodies, checked by hand where a fault has to name its exact place."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from proxy.errors import InvalidRequest

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_UNPLAIN = re.compile(r"[^A-Za-z0-9._-]")


def decode_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. Raises InvalidRequest."""
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        hint = " (an unpaired surrogate escape?)" if _SURROGATE.search(raw) else ""
        raise InvalidRequest(f"the body is not valid JSON: {error}{hint}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object")
    return value


def object_at(value: Any, where: str) -> dict[str, Any]:
    """Raises InvalidRequest unless `value`, which stands at `where`, is an object."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} is an object", param=where)
    return value


def text_at(value: Any, where: str) -> str:
    """Raises InvalidRequest unless `value`, which stands at `where`, is a string."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} is a string", param=where)
    return value


def plain(text: str) -> str:
    """Client text that may stand in a header."""
    return _UNPLAIN.sub("?", text)[:40]
