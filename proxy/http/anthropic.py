"""Requests of Anthropic's clients: how they are known, and what their errors look like.

The envelope is Anthropic's around ours: `{"type": "error", "error": {"type", "message", "param", "code"},
"request_id"}`. Their SDKs read the id of a request in the header `request-id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

_PATH = re.compile(r"(?:/sessions/[^/]+)?(?:/v1)?/messages(?:/.*)?")
_VERSION = "anthropic-version"

_TYPES = {
    "server_error": "api_error",
    "upstream_error": "api_error",
    "unavailable_error": "overloaded_error",
    "requests": "rate_limit_error",
    "tokens": "rate_limit_error",
}
"""Anthropic's words for types of ours; the others are the same."""

_CODES = {"payload_too_large": "request_too_large", "engine_timeout": "timeout_error"}
"""Where they have a type for what is a code of ours."""


def speaks_anthropic(scope: Scope) -> bool:
    """By the path, or by the header that no client of theirs leaves out."""
    return _VERSION in Headers(scope=scope) or _PATH.fullmatch(scope["path"]) is not None


def request_id_of(scope: Scope) -> str | None:
    """None outside of the request boundary, which gives it."""
    request_id: str | None = scope.get("state", {}).get("request_id")
    return request_id


def anthropic_envelope(envelope: Mapping[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """An error's envelope, made of ours."""
    error = envelope["error"]
    kind = _CODES.get(error["code"]) or _TYPES.get(error["type"], error["type"])
    told = {"type": "error", "error": {**error, "type": kind}}
    return told if request_id is None else {**told, "request_id": request_id}
