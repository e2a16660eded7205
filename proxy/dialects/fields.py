"""Fields of request bodies, checked by hand where a fault has to name its exact place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel

from proxy.errors import InvalidRequest

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_READ_ELSEWHERE = frozenset({"metadata", "prompt_cache_key", "user", "safety_identifier"})
"""Fields that name sessions and users, in every dialect."""

_ASKS_FOR_NOTHING = {"service_tier": "auto"}
"""Values by which a client says that it wants nothing in particular."""

_UNPLAIN = re.compile(r"[^A-Za-z0-9._-]")


def decode_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request's body. Raises InvalidRequest."""
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}{_hint(raw)}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object")
    return value


def decode_listing(raw: bytes, name: str) -> dict[str, Any]:
    """The same, with the elements of the list `name` left as they came. Raises InvalidRequest."""
    try:
        parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        listed = parts.pop(name, None)
        value = {key: msgspec.json.decode(part) for key, part in parts.items()}
        if listed is not None:
            value[name] = msgspec.json.decode(listed, type=list[msgspec.Raw])
    except (ValueError, RecursionError):
        return decode_body(raw)  # which says what is wrong, unless it is just no list
    return value


def decode_element(raw: msgspec.Raw, where: str) -> Any:
    """An element of a listing, which stands at `where`. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not valid JSON: {error}{_hint(raw)}", param=where) from error


def unknown_fields(value: Mapping[str, Any], body: type[BaseModel]) -> list[str]:
    """Warn of each field of a request that `body` does not have and nobody else reads. Null asks for nothing."""
    unread = value.keys() - body.model_fields.keys() - _READ_ELSEWHERE
    asked = [name for name in sorted(unread) if value[name] not in (None, _ASKS_FOR_NOTHING.get(name))]
    return [f"{plain(name)} has no effect: there is no such field" for name in asked]


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


def list_at(value: Any, where: str) -> list[Any]:
    """Raises InvalidRequest unless `value`, which stands at `where`, is a list."""
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} is a list", param=where)
    return value


def _hint(raw: bytes) -> str:
    return " (an unpaired surrogate escape?)" if _SURROGATE.search(raw) else ""


def plain(text: str) -> str:
    """Client text that may stand in a header."""
    return _UNPLAIN.sub("?", text)[:40]
