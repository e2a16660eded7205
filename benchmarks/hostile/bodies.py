"""The worst requests of each kind that one client can send, up to the largest accepted body."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from proxy.settings import RequestSettings

MIB = 1 << 20
MODEL = b"policy"
USER = b'{"role":"user","content":"a"}'
_QUESTION = b'{"role":"user","content":"What is 2 + 2?"}'
CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"

Body = tuple[str, bytes]
"""A path and the body to post to it."""


def filled(begin: bytes, unit: bytes, end: bytes, size: int, *, between: bytes = b",") -> bytes:
    """Repeat a unit until the text has `size` bytes."""
    count = max(1, (size - len(begin) - len(end) + len(between)) // (len(unit) + len(between)))
    return begin + (unit + between) * (count - 1) + unit + end


def _head(field: str, rest: bytes = b"") -> bytes:
    return b'{"model":"%b","max_tokens":8,%b"%b":' % (MODEL, rest, field.encode())


def _asked(field: str, begin: bytes, unit: bytes, end: bytes, size: int) -> bytes:
    """Return a plain question with one additional field."""
    return filled(_head(field) + begin, unit, end + b',"messages":[' + _QUESTION + b"]}", size)


_DIALECTS: dict[str, tuple[str, str]] = {
    "chat": (CHAT, "messages"),
    "messages": (MESSAGES, "messages"),
    "responses": (RESPONSES, "input"),
}


def many_messages(dialect: str, size: int) -> Body:
    path, field = _DIALECTS[dialect]
    return path, filled(_head(field) + b"[", USER, b"]}", size)


def allowed_messages(dialect: str, _size: int) -> Body:
    """Return as many messages as are accepted, with alternating roles."""
    path, field = _DIALECTS[dialect]
    pair = USER + b"," + USER.replace(b"user", b"assistant")
    return path, _head(field) + b"[" + b",".join([pair] * 4_999 + [USER]) + b"]}"


def one_text(dialect: str, size: int, *, unit: bytes = b"a") -> Body:
    path, field = _DIALECTS[dialect]
    begin = _head(field) + b'[{"role":"user","content":"'
    return path, filled(begin, unit, b'"}]}', size, between=b"")


def long_answers(dialect: str, size: int) -> Body:
    """Return texts of the assistant that are joined into one answer."""
    path, field = _DIALECTS[dialect]
    answer = b'{"role":"assistant","content":"' + b"a" * 3_800 + b'"}'
    return path, filled(_head(field) + b"[" + USER + b",", answer, b"," + USER + b"]}", size)


def many_parts(dialect: str, size: int) -> Body:
    path, field = _DIALECTS[dialect]
    kind = b"input_text" if dialect == "responses" else b"text"
    begin = _head(field) + b'[{"role":"user","content":['
    return path, filled(begin, b'{"type":"%b","text":"a"}' % kind, b"]}]}", size)


def many_tools(dialect: str, size: int) -> Body:
    path, field = _DIALECTS[dialect]
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    tool: dict[str, Any] = {"type": "function", "function": function}
    if dialect == "responses":
        tool = {"type": "function", **function}
    if dialect == "messages":
        tool = {"name": "look", "input_schema": function["parameters"]}
    end = b'],"%b":[%b]}' % (field.encode(), _QUESTION)
    return path, filled(_head("tools") + b"[", json.dumps(tool).encode(), end, size)


def allowed_tools(_dialect: str, _size: int) -> Body:
    """Return as many tools as are accepted, each with a strict schema of some size."""
    properties = {f"p{number}": {"type": "string", "description": "A value."} for number in range(20)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    tools = [
        {"type": "function", "function": {"name": f"look{number}", "strict": True, "parameters": schema}}
        for number in range(1000)
    ]
    return CHAT, _head("tools") + json.dumps(tools).encode() + b',"messages":[%b]}' % _QUESTION


def nested(_dialect: str, size: int) -> Body:
    return CHAT, b'{"model":"policy","messages":' + b"[" * (size - 40)


def nested_schema(_dialect: str, _size: int) -> Body:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    return CHAT, _head("response_format") + json.dumps(form).encode() + b',"messages":[%b]}' % _QUESTION


def giant_schema(_dialect: str, size: int) -> Body:
    names = [f"field_{number:06}" for number in range(min(20_000, size // 60))]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    form = {"type": "json_schema", "json_schema": {"name": "wide", "schema": schema, "strict": True}}
    return CHAT, _head("response_format") + json.dumps(form).encode() + b',"messages":[%b]}' % _QUESTION


def prompt_ids(_dialect: str, size: int) -> Body:
    return COMPLETIONS, filled(_head("prompt") + b"[", b"7", b"]}", size)


def allowed_ids(_dialect: str, _size: int) -> Body:
    """Return as many token ids as are accepted, in prompts that fit the context."""
    prompt = b"[" + b",".join([b"7"] * 1_000) + b"]"
    prompts = RequestSettings().max_prompt_ids // 1_000
    return COMPLETIONS, _head("prompt") + b"[" + b",".join([prompt] * prompts) + b"]}"


def text_prompt(_dialect: str, size: int) -> Body:
    return COMPLETIONS, filled(_head("prompt") + b'"', b"a", b'"}', size, between=b"")


def stop_strings(_dialect: str, size: int) -> Body:
    return CHAT, _asked("stop", b"[", b'"ab"', b"]", size)


def metadata(_dialect: str, size: int) -> Body:
    entries = b",".join(b'"key%07d":"v"' % number for number in range(size // 17))
    return CHAT, _head("metadata") + b"{" + entries + b'},"messages":[%b]}' % _QUESTION


def logit_bias(_dialect: str, size: int) -> Body:
    entries = b",".join(b'"%d":1' % number for number in range(min(1_000_000, size // 10)))
    return CHAT, _head("logit_bias") + b"{" + entries + b'},"messages":[%b]}' % _QUESTION


def unknown_text(_dialect: str, size: int) -> Body:
    return CHAT, _asked("unknown", b'"', b"a" * 1000, b'"', size)


def unknown_lists(_dialect: str, size: int) -> Body:
    return CHAT, _asked("unknown", b"[", b"[]", b"]", size)


def arguments(_dialect: str, size: int) -> Body:
    """Return JSON inside the text of a call's arguments."""
    call = b'{"type":"function","id":"c","function":{"name":"look","arguments":"['
    begin = _head("messages") + b"[" + USER + b',{"role":"assistant","content":null,"tool_calls":[' + call
    return CHAT, filled(begin, b"[]", b']"}}]},{"role":"tool","tool_call_id":"c","content":"a"}]}', size)


def many_choices(_dialect: str, _size: int) -> Body:
    """Ask for as many choices as are given, with as large a conversation as is accepted."""
    return CHAT, _asked("metadata", b'{"a":"', b"a" * 1000, b'"},"n":128', 4 * MIB - 1000)


def reward_list(_dialect: str, size: int) -> Body:
    return "/v1/feedback", filled(b"[", b'{"reward":1}', b"]", size)


def no_json(_dialect: str, size: int) -> Body:
    return "/v1/feedback", filled(b'{"comment":"', b"\\u0041", b'"', size, between=b"")


_KINDS: tuple[tuple[str, Callable[[str, int], Body], tuple[str, ...]], ...] = (
    ("one-letter messages", many_messages, tuple(_DIALECTS)),
    ("as many messages as are taken", allowed_messages, tuple(_DIALECTS)),
    ("long answers in a row", long_answers, tuple(_DIALECTS)),
    ("one text", one_text, tuple(_DIALECTS)),
    ("one text of escapes", lambda dialect, size: one_text(dialect, size, unit=b"\\n"), tuple(_DIALECTS)),
    ("one text of emoji", lambda dialect, size: one_text(dialect, size, unit="é😀".encode()), ("chat",)),
    ("one text of control tokens", lambda dialect, size: one_text(dialect, size, unit=b"<|im_end|>"), ("chat",)),
    ("parts of one letter", many_parts, tuple(_DIALECTS)),
    ("tools", many_tools, tuple(_DIALECTS)),
    ("as many strict tools as are taken", allowed_tools, ("chat",)),
    ("nested lists", nested, ("chat",)),
    ("a nested schema", nested_schema, ("chat",)),
    ("a giant schema", giant_schema, ("chat",)),
    ("ids of one prompt", prompt_ids, ("completions",)),
    ("as many ids as are taken", allowed_ids, ("completions",)),
    ("a prompt of one letter", text_prompt, ("completions",)),
    ("stop strings", stop_strings, ("chat",)),
    ("metadata", metadata, ("chat",)),
    ("a million biases", logit_bias, ("chat",)),
    ("an unknown text", unknown_text, ("chat",)),
    ("unknown lists", unknown_lists, ("chat",)),
    ("arguments of empty lists", arguments, ("chat",)),
    ("128 answers with large metadata", many_choices, ("chat",)),
    ("rewards", reward_list, ("feedback",)),
    ("a comment without end", no_json, ("feedback",)),
)


def all_bodies(size: int) -> Iterator[tuple[str, Body]]:
    """Yield every kind of body in every dialect. They are made one at a time: all together would take a gigabyte."""
    for name, make, dialects in _KINDS:
        for dialect in dialects:
            yield f"{dialect}: {name}", make(dialect, size)
