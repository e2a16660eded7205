"""Bounds on what one call may hold, checked before work is done on it, and which calls are large.

A large call is worked on by `proxy.http.workers`, so that the others do not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.errors import InvalidRequest
from proxy.http.json_size import has_more_escapes, has_more_values
from proxy.settings import RequestSettings

LARGE_BYTES = 1 << 18
"""Of a body: longer ones take more than a few milliseconds to read and hash."""
LARGE_OBJECTS = 800
"""Of a body: messages and schemas cost some ten microseconds each to read."""
LARGE_LISTS = 1 << 13
"""Commas of a body: ids of a prompt cost about a microsecond each."""
LARGE_MESSAGES = 256
LARGE_TOOLS = 100
"""Of a call: each costs some ten microseconds to hash and render."""
LARGE_TEXT = 1 << 14
"""Bytes of new text: a tokenizer takes about a microsecond for each."""
HUGE_BYTES = 1 << 20
"""Of a body: memory of longer ones is given back to the operating system afterwards, and the JSON inside of their
texts is counted."""

DEFAULT_BOUNDS = RequestSettings()

_MIB = 1 << 20
_CONVERSATION = frozenset({"messages", "input", "prompt", "system", "instructions"})
"""Fields that the context's length bounds. The others are `requests.max_options_mib`."""
_LISTS = {"messages": "max_messages", "input": "max_messages", "tools": "max_tools", "functions": "max_tools"}
"""Fields that are lists, and the keys of their bounds."""


def has_much_to_read(raw: bytes) -> bool:
    """Whether decoding and checking this body might take more than a few milliseconds."""
    return len(raw) > LARGE_BYTES or raw.count(b"{") > LARGE_OBJECTS or raw.count(b",") > LARGE_LISTS


def check_body(raw: bytes, bounds: RequestSettings, *, prompt_ids: bool = False) -> None:
    """Raises InvalidRequest for a body that would take too much to decode, or has too much beside its conversation.
    `prompt_ids`: the body may hold token ids, which have a bound of their own."""
    most = bounds.max_values + (bounds.max_prompt_ids if prompt_ids else 0)
    if has_more_values(raw, most):
        what = "messages, tools or token ids" if prompt_ids else "messages, tools or parts"
        named = "requests.max_values + requests.max_prompt_ids" if prompt_ids else "requests.max_values"
        raise InvalidRequest(f"the body has more than {most} JSON values ({named}): send fewer {what}")
    if len(raw) > bounds.max_escapes and has_more_escapes(raw, bounds.max_escapes):
        raise InvalidRequest(
            f"the body has more than {bounds.max_escapes} backslashes ({_named('max_escapes')}): write its texts"
            " in UTF-8 instead of escapes, or send less"
        )
    if len(raw) > bounds.max_options_mib * _MIB:
        _check_options(raw, bounds)


def check_lists(value: Mapping[str, Any], bounds: RequestSettings) -> None:
    """Raises InvalidRequest for too many messages, items or tools."""
    for field, key in _LISTS.items():
        listed = value.get(field)
        if isinstance(listed, list):
            _check_count(len(listed), field, key, bounds)


def check_tools(count: int, bounds: RequestSettings) -> None:
    """Raises InvalidRequest for too many tools, those in namespaces and in items included."""
    _check_count(count, "tools", "max_tools", bounds)


def check_parts(parts: Sequence[Any], where: str, most: int) -> None:
    """Raises InvalidRequest for too many parts or calls in one message."""
    if len(parts) > most:
        raise InvalidRequest(
            f"{where}: {len(parts)} are sent, and at most {most} are taken ({_named('max_parts')})", param=where
        )


def check_arguments(messages: Sequence[Mapping[str, Any]], bounds: RequestSettings) -> None:
    """Raises InvalidRequest where the arguments of tool calls, which are JSON inside of strings, hold too many
    values: templates are given them decoded."""
    arguments = [
        function["arguments"].encode(errors="replace")
        for message in messages
        for call in message.get("tool_calls") or ()
        if isinstance((function := call["function"]).get("arguments"), str)
    ]
    if sum(map(len, arguments)) > bounds.max_values and has_more_values(b",".join(arguments), bounds.max_values):
        raise InvalidRequest(
            f"the arguments of tool calls have more than {bounds.max_values} JSON values ({_named('max_values')})",
            param="messages",
        )


def _check_options(raw: bytes, bounds: RequestSettings) -> None:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return  # the reader says what is wrong
    sizes = {name: len(field) for name, field in fields.items() if name not in _CONVERSATION}
    if sum(sizes.values()) > bounds.max_options_mib * _MIB:
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidRequest(
            f"everything but the conversation may have {bounds.max_options_mib} MiB together "
            f"({_named('max_options_mib')}): {largest[:64]} has {sizes[largest]} bytes",
            param=largest[:64],
        )


def _check_count(count: int, field: str, key: str, bounds: RequestSettings) -> None:
    most: int = getattr(bounds, key)
    if count > most:
        raise InvalidRequest(f"{field}: {count} are sent, and at most {most} are taken ({_named(key)})", param=field)


def _named(key: str) -> str:
    return f"requests.{key}"
