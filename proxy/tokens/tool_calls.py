"""Tool calls as Hermes and Qwen2.5 write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` in the text.

Text passes as it comes; only what may be the beginning of a call is held back (and white space before it, which
belongs to the call's layout). A call is given whole, once its end tag came and it proved valid: JSON, with a string
`name` and an object `arguments`. Anything else comes back as the text that it is; nothing here raises. To stream
arguments before their end is known would make a malformed call impossible to take back.

The first end tag ends a call, even inside a string of its arguments: templates cannot write such a call either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from proxy.tokens.stop_strings import partial_marker

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is the model's own JSON text of the object, not a rewriting. `index` counts the calls of an answer
    from 0."""

    index: int
    name: str
    arguments: str


Event = str | ToolCall


class _Body(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class ToolCallParser:
    """One answer's parser. Any split of the text into pieces gives the same text and calls."""

    def __init__(self) -> None:
        self._held = ""
        self._in_call = False
        self._searched = 0
        self._count = 0

    def feed(self, text: str) -> list[Event]:
        self._held += text
        return list(_joined(self._advance()))

    def finish(self) -> list[Event]:
        """What was held back: an unfinished call is text; white space behind the last call is nothing."""
        rest, self._held, self._in_call = self._held, "", False
        if not rest or (self._count and not rest.strip()):
            return []
        return [rest]

    def _advance(self) -> Iterator[Event]:
        while True:
            event = self._call() if self._in_call else self._text()
            if event is None:
                return
            yield from event

    def _text(self) -> list[Event] | None:
        """Text before the next call; None when more input is needed for anything further."""
        start = self._held.find(OPEN)
        if start >= 0:
            self._in_call = True
            self._searched = 0
            kept = len(self._held[:start].rstrip())
        else:
            before = self._held[: len(self._held) - partial_marker(self._held, OPEN)]
            kept = len(before.rstrip())
        released, self._held = self._held[:kept], self._held[kept:]
        if self._in_call:
            return [released]
        return [released] if released else None

    def _call(self) -> list[Event] | None:
        """The call that `_held` begins with, after white space. Only new text is searched for its end."""
        end = self._held.find(CLOSE, self._searched)
        if end < 0:
            self._searched = max(0, len(self._held) - len(CLOSE) + 1)
            return None
        whole, self._held = self._held[: end + len(CLOSE)], self._held[end + len(CLOSE) :]
        self._in_call = False
        body = whole.lstrip()[len(OPEN) : -len(CLOSE)]
        call = _valid_call(body, self._count)
        if call is None:
            return [whole]
        self._count += 1
        return [call]


def parse(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """A whole answer: its text, and its calls."""
    parser = ToolCallParser()
    events = parser.feed(text) + parser.finish()
    content = "".join(event for event in events if isinstance(event, str))
    return content, tuple(event for event in events if isinstance(event, ToolCall))


def _joined(events: Iterator[Event]) -> Iterator[Event]:
    """Neighbouring pieces of text as one; empty ones left out."""
    text = ""
    for event in events:
        if isinstance(event, str):
            text += event
            continue
        if text:
            yield text
        text = ""
        yield event
    if text:
        yield text


def _valid_call(body: str, index: int) -> ToolCall | None:
    try:
        parsed = msgspec.json.decode(body.strip(), type=_Body)
        arguments = bytes(parsed.arguments)
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return ToolCall(index=index, name=parsed.name, arguments=arguments.decode())
