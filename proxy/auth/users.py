"""Find the users on whose behalf an agent makes a call.

Agents name them in `user`, `safety_identifier`, `metadata.user_id` or `metadata.user`. Claude Code writes device,
account and session into `metadata.user_id`, of which the session is not part of the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_FIELDS = frozenset({"user", "safety_identifier", "metadata"})
_LONGEST = 2000  # characters; longer text is no name, and hashing it would cost every call
_CLAUDE_CODE = re.compile(r"(user_\w+_account_[\w-]*)_session_[0-9A-Za-z-]+")


def users_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every name under which somebody may later ask for the data of the body's user, each once."""
    if _FIELDS.isdisjoint(body):
        return ()
    return tuple(dict.fromkeys(name for value in _values(body) for name in _names(value)))


def _values(body: Mapping[str, Any]) -> Iterator[Any]:
    yield body.get("user")
    yield body.get("safety_identifier")
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping):
        yield metadata.get("user_id")
        yield metadata.get("user")


def _names(value: Any) -> Iterator[str]:
    # Some agents send a database id as a number. Larger numbers take quadratic time to write as text.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        value = str(value)
    if not isinstance(value, str) or not 0 < len(name := value.strip()) <= _LONGEST:
        return
    yield name
    found = _CLAUDE_CODE.fullmatch(name)
    if found is not None:
        yield found[1]
    elif name.startswith("{"):
        yield from _parts(name)


def _parts(text: str) -> Iterator[str]:
    """Yield account and device of the JSON that Claude Code sends, `{"device_id", "account_uuid", "session_id"}`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict):
        for key in ("account_uuid", "device_id"):
            if isinstance(value.get(key), str) and value[key]:
                yield value[key]
