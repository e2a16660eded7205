"""Bounds on the size of one call, checked before any work is done on it, and the sizes from which a call is large.

A worker thread (`proxy.http.workers`) reads and renders large calls, so that other calls do not wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.errors import InvalidRequest
from proxy.http.json_size import has_more_escapes, has_more_values
from proxy.settings import RequestSettings

LARGE_BYTES = 1 << 18
"""Length of a body: a longer one takes more than a few milliseconds to read and hash."""
LARGE_OBJECTS = 800
"""Objects in a body: messages and schemas take some ten microseconds each to read."""
LARGE_LISTS = 1 << 13
"""Commas in a body: ids of a prompt take about a microsecond each to read."""
LARGE_MESSAGES = 256
LARGE_TOOLS = 100
"""Messages and tools of a call: each takes some ten microseconds to hash and render."""
LARGE_TEXT = 1 << 14
"""Bytes of new text: a tokenizer takes about a microsecond for each."""
HUGE_BYTES = 1 << 20
"""Length of a body from which memory is given back to the operating system afterwards, and JSON inside of texts is
counted."""

DEFAULT_BOUNDS = RequestSettings()

_MIB = 1 << 20
# Fields that the context length bounds. `requests.max_options_mib` bounds all others together.
_CONVERSATION = frozenset({"messages", "input", "prompt", "system", "instructions"})
# Fields that hold lists, each with the setting that bounds its length.
_LISTS = {"messages": "max_messages", "input": "max_messages", "tools": "max_tools", "functions": "max_tools"}


def has_much_to_read(raw: bytes) -> bool:
    """Return whether decoding and checking this body might take more than a few milliseconds."""
    return len(raw) > LARGE_BYTES or raw.count(b"{") > LARGE_OBJECTS or raw.count(b",") > LARGE_LISTS


def check_body(raw: bytes, bounds: RequestSettings, *, prompt_ids: bool = False) -> None:
    """Raise InvalidRequest for a body that takes too much work or memory to decode, or has too much beside its
    conversation. `prompt_ids`: the body may hold token ids, which have a bound of their own."""
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
    """Raise InvalidRequest for too many messages, items or tools."""
    for field, listed in value.items():
        if field in _LISTS and listed.__class__ is list:
            _check_count(len(listed), field, _LISTS[field], bounds)


def check_tools(count: int, bounds: RequestSettings) -> None:
    """Raise InvalidRequest for too many tools, including those in namespaces and items."""
    _check_count(count, "tools", "max_tools", bounds)


def check_parts(parts: Sequence[Any], where: str, most: int) -> None:
    """Raise InvalidRequest for too many parts or calls in one message."""
    if len(parts) > most:
        raise InvalidRequest(
            f"{where}: {len(parts)} are sent, and at most {most} are taken ({_named('max_parts')})", param=where
        )


def check_arguments(messages: Sequence[Mapping[str, Any]], bounds: RequestSettings) -> None:
    """Raise InvalidRequest if the arguments of tool calls, which are JSON inside of strings, hold too many values:
    they are decoded for the template."""
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
        return  # the dialect's parser reports what is wrong
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
