"""Decode request bodies and check single fields by hand, where an error has to name the exact place in the body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from pydantic import BaseModel

from proxy.errors import InvalidRequest

# An escape of half a UTF-16 pair, which JavaScript writes for a string that was cut in the middle of a character.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# Identification of sessions and users reads these fields in every dialect, so they never cause a warning.
_READ_ELSEWHERE = frozenset({"metadata", "prompt_cache_key", "user", "safety_identifier"})

# Explicit defaults: SDKs send them although the user asked for nothing.
_EXPLICIT_DEFAULTS = {"service_tier": "auto"}

_UNSAFE_IN_HEADER = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST_QUOTE = 40  # characters of client text in one warning; all warnings share one header of bounded length


def decode_body(raw: bytes) -> dict[str, Any]:
    """Decode the JSON object in a request's body. Raise InvalidRequest if it is not one."""
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}{_hint(raw)}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body is not a JSON object")
    return value


def decode_listing(raw: bytes, name: str) -> dict[str, Any]:
    """Decode the JSON object in a request's body, but leave the elements of the list `name` undecoded.

    Raise InvalidRequest if the body is not a JSON object.
    """
    # A conversation is sent whole with every call, so decoding the messages that are known already would make the
    # cost of a session quadratic in its length.
    try:
        parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        listed = parts.pop(name, None)
        value = {key: msgspec.json.decode(part) for key, part in parts.items()}
        if listed is not None:
            value[name] = msgspec.json.decode(listed, type=list[msgspec.Raw])
    except (ValueError, RecursionError):
        # Plain decoding reports what is wrong with the JSON. If it succeeds, `name` is not a list, and the
        # validation of the body reports that.
        return decode_body(raw)
    return value


def split_listing(raw: bytes, name: str) -> tuple[bytes, list[msgspec.Raw]] | None:
    """Return the JSON object in a request's body without its list `name`, and the list's elements undecoded.

    Return None for a body without such a list, or with an empty one.
    """
    try:
        parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        elements = msgspec.json.decode(parts.pop(name), type=list[msgspec.Raw])
    except (KeyError, ValueError, RecursionError):
        return None
    return (msgspec.json.encode(parts), elements) if elements else None


def decode_element(raw: msgspec.Raw, where: str) -> Any:
    """Decode a list element that `decode_listing` left undecoded; `where` is its place in the body.

    Raise InvalidRequest if it is not valid JSON.
    """
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not valid JSON: {error}{_hint(raw)}", param=where) from error


def unknown_fields(value: Mapping[str, Any], body: type[BaseModel]) -> list[str]:
    """Return a warning for each field of the request `value` that neither `body` nor another reader knows.

    A field that is null or has its default value asks for nothing and causes no warning.
    """
    known = _known_fields(body)
    unread = [name for name in value if name not in known]
    return [
        f"{plain(name)} has no effect: there is no such field"
        for name in sorted(unread)
        if value[name] not in (None, _EXPLICIT_DEFAULTS.get(name))
    ]


@cache  # once for each of a few classes
def _known_fields(body: type[BaseModel]) -> frozenset[str]:
    return _READ_ELSEWHERE | body.model_fields.keys()


def object_at(value: Any, where: str) -> dict[str, Any]:
    """Return `value`, found at `where` in the body. Raise InvalidRequest if it is not an object."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    return value


def text_at(value: Any, where: str) -> str:
    """Return `value`, found at `where` in the body. Raise InvalidRequest if it is not a string."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string", param=where)
    return value


def list_at(value: Any, where: str) -> list[Any]:
    """Return `value`, found at `where` in the body. Raise InvalidRequest if it is not a list."""
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    return value


def _hint(raw: bytes) -> str:
    return " (an unpaired surrogate escape?)" if _SURROGATE.search(raw) else ""


def plain(text: str) -> str:
    """Return client text shortened and with unsafe characters replaced, so that it can be quoted in a header."""
    return _UNSAFE_IN_HEADER.sub("?", text)[:_LONGEST_QUOTE]
