"""Recognise requests of Anthropic's clients and write errors for them.

The envelope is Anthropic's with our fields: `{"type": "error", "error": {"type", "message", "param", "code"},
"request_id"}`. Anthropic's SDKs read the request's id from the header `request-id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

_PATH = re.compile(r"(?:/sessions/[^/]+)?(?:/v1)?/messages(?:/.*)?")
_VERSION = "anthropic-version"

# Anthropic's error types for ours, where they differ.
_TYPES = {
    "server_error": "api_error",
    "upstream_error": "api_error",
    "unavailable_error": "overloaded_error",
    "requests": "rate_limit_error",
    "tokens": "rate_limit_error",
    "insufficient_quota": "rate_limit_error",
}

# Anthropic's error types for our error codes, which win over the types above.
_CODES = {"payload_too_large": "request_too_large", "engine_timeout": "timeout_error"}


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request uses Anthropic's API: by its path, or by the header that all its clients send."""
    return _VERSION in Headers(scope=scope) or _PATH.fullmatch(scope["path"]) is not None


def request_id_of(scope: Scope) -> str | None:
    """Return the request's id; None outside RequestBoundary, which assigns it."""
    request_id: str | None = scope.get("state", {}).get("request_id")
    return request_id


def anthropic_envelope(envelope: Mapping[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """Convert an error's envelope from OpenAI's form into Anthropic's."""
    error = envelope["error"]
    kind = _CODES.get(error["code"]) or _TYPES.get(error["type"], error["type"])
    converted = {"type": "error", "error": {**error, "type": kind}}
    return converted if request_id is None else {**converted, "request_id": request_id}
