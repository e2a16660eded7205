"""Conversations as data that a judge reads. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

# Characters of a notice about left out text, counted in the bound.
_NOTICE = 80
# The part of a line that is always shown, even if many messages have to fit.
_SHORTEST_LINE = 200


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as lines of JSON. `digest` is that of the whole conversation, even if `is_cut`."""

    text: str
    digest: str
    is_cut: bool


def transcript_of(messages: Sequence[Mapping[str, Any]], *, task: str | None, max_characters: int) -> Transcript:
    """Return the messages, one a line, in about `max_characters` characters at most."""
    lines = [_line(message) for message in messages]
    whole = "\n".join(([_json({"task": task})] if task is not None else []) + lines)
    text = whole if len(whole) <= max_characters else _cut(lines, max_characters)
    return Transcript(text=text, digest=hashlib.sha256(whole.encode()).hexdigest(), is_cut=text is not whole)


def has_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether there is an answer of the agent to judge."""
    return any(message.get("role") == "assistant" for message in messages)


def mark_of(texts: Sequence[str]) -> str:
    """Return a word that occurs in none of the texts, the same one for the same texts. Delimiters made of it cannot
    be closed from inside."""
    # From the texts' own hash: nobody can write a text that contains its hash, and repeated requests are equal, so
    # that providers can reuse their caches. The loop only removes the last doubt.
    number = 0
    while True:
        material = "\n".join([str(number), *texts])
        mark = "conversation-" + hashlib.sha256(material.encode()).hexdigest()[:16]
        if not any(mark in text for text in texts):
            return mark
        number += 1


def _line(message: Mapping[str, Any]) -> str:
    known = ("role", "name", "reasoning_content", "content", "tool_calls", "tool_call_id")
    return _json({key: message[key] for key in known if message.get(key) is not None})


def _json(value: Any) -> str:
    # Newlines inside of texts are escaped, so no text can look like another message. Lone surrogates, which UTF-8
    # cannot carry, are replaced.
    return json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace").decode()


def _cut(lines: Sequence[str], bound: int) -> str:
    """Return the lines cut to about `bound` characters: long ones in their middle, then the middle ones of all."""
    most = max(len(lines), 1)
    share = max(_SHORTEST_LINE, bound // most - 1)
    short = [line if len(line) <= share else _without_middle(line, share) for line in lines]
    # What short lines leave is given to the last one, which is usually the answer that matters most.
    spare = bound - sum(len(line) + 1 for line in short)
    if spare > 0 and len(lines[-1]) > len(short[-1]):
        short[-1] = _without_middle(lines[-1], len(short[-1]) + spare)
    if sum(len(line) + 1 for line in short) <= bound:
        return "\n".join(short)
    first, last = _ends(short, bound - _NOTICE)
    left_out = len(short) - len(first) - len(last)
    return "\n".join([*first, f"[{left_out} messages were left out here, to shorten]", *last])


def _without_middle(line: str, bound: int) -> str:
    if len(line) <= bound:
        return line
    half = max(1, (bound - _NOTICE) // 2)
    return f"{line[:half]}[{len(line) - 2 * half} characters were left out here, to shorten]{line[-half:]}"


def _ends(lines: Sequence[str], bound: int) -> tuple[list[str], list[str]]:
    """Return the first and the last lines that fit, half of the room for each."""
    first: list[str] = []
    last: list[str] = []
    room = bound // 2
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            break
        first.append(line)
    room = bound // 2
    for line in reversed(lines[len(first) :]):
        room -= len(line) + 1
        if room < 0:
            break
        last.insert(0, line)
    return first, last
