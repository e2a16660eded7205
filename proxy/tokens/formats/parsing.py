"""The parsers' common part: the text around calls, and JSON of a name and its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from proxy.tokens.scanning import Scanner

Tools = Sequence[Mapping[str, Any]]
"""Tools in the shape of chat completions: `{"type": "function", "function": {"name", "parameters"}}`."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A complete tool call.

    `arguments` is the JSON text of an object: the model's own text, unaltered, in formats that write JSON. `index`
    counts the calls of an answer from 0.
    """

    index: int
    name: str
    arguments: str


TextOrCall = str | ToolCall

# No function has a longer name: text behind a marker that goes on for longer is not a call and must stream.
_LONGEST_NAME = 256

NamedArguments = tuple[str, str]
"""A call's name, and the JSON text of its arguments."""


class CallParser(Scanner):
    """Splits one answer into text and tool calls.

    Text passes as it comes, except for what may be the beginning of a call and the white space before it, which
    belongs to the call's layout. A call is emitted as a whole, once its end has come and it is valid: arguments that
    were streamed earlier could not be taken back if the call proved malformed. A malformed call is emitted as text.
    Nothing here raises.
    """

    openings: ClassVar[tuple[str, ...]]
    """The texts that begin a call."""
    separator: ClassVar[str] = ""
    """Punctuation behind a call that is layout, not text."""

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__()
        self._tools = tools or ()
        self._opening_pattern = re.compile("|".join(map(re.escape, self.openings)))
        self._space: list[str] = []
        self._call: list[str] = []
        self._events: list[TextOrCall] = []
        self._count = 0
        self._name = ""
        self._step = self._text

    def feed(self, text: str) -> list[TextOrCall]:
        """Return the text and the calls that `text` completes."""
        self._scan(text)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[TextOrCall]:
        """Return the text that was held back, once the answer is over: an unfinished call is text, and white space
        behind the last call is dropped."""
        rest = "".join([*self._space, *self._call, *self._pending(), self._window[self._at :]])
        self._space, self._call, self._window, self._at = [], [], "", 0
        layout = rest.replace(self.separator, "") if self.separator else rest
        return [rest] if rest and (layout.strip() or not self._count) else []

    def _text(self) -> bool:
        """Emit the text before the next call."""
        found = self._opening_pattern.search(self._window, self._at)
        if found is None:
            self._emit_text(len(self._window) - self._partial(self.openings))
            return False
        self._emit_text(found.start())
        self._consume(found.end(), self._call)
        self._begin_call(found[0])
        return True

    def _emit_text(self, end: int) -> None:
        """Emit the text up to `end`, without trailing white space, which may belong to a call's layout."""
        text = self._window[self._at : end]
        self._at = end
        stripped = text.rstrip()
        if stripped:
            self._events.append("".join([*self._space, stripped]))
            self._space = []
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])

    def _consume_name(self, allowed: re.Pattern[str]) -> str | None:
        """Return the name that begins here, once something else follows it; an empty text if it is longer than any
        name; None if more text is needed. `_name` collects what has come so far."""
        end = self._match(allowed)
        self._name += self._window[self._at : end]
        self._consume(end, self._call)
        if len(self._name) > _LONGEST_NAME:
            return ""
        return None if self._at == len(self._window) else self._name

    def _pending(self) -> list[str]:
        """Return the consumed parts of the call that a subclass holds in lists of its own."""
        return []

    def _begin_call(self, marker: str) -> None:
        """Choose the step that parses what follows `marker`, one of `openings`."""
        raise NotImplementedError

    def _expect(self, steps: Mapping[str, Callable[[], bool]]) -> bool:
        """Go on with the step of the text that follows. If it is none of them, the marker was only mentioned: reject
        it at once, so that the text streams on."""
        found = self._next(tuple(steps))
        if not found:
            return found is not None and self._reject()
        self._step = steps[found]
        return True

    def _reject(self) -> bool:
        """Emit what looked like a call as text."""
        self._events.append("".join([*self._space, *self._call]))
        self._space, self._call = [], []
        self._step = self._text
        return True

    def _end_call(self, calls: Sequence[NamedArguments] | None) -> bool:
        """Emit `calls`, which one stretch of markup holds; None or none of them means that it is malformed."""
        if not calls:
            return self._reject()
        for name, arguments in calls:
            self._events.append(ToolCall(index=self._count, name=name, arguments=arguments))
            self._count += 1
        self._space, self._call = [], []
        self._step = self._text
        return True


class _Body(msgspec.Struct):
    """A call as a JSON object. Llama writes `parameters` for `arguments`; other keys (an id, a type) are ignored."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def json_call(text: str) -> list[NamedArguments] | None:
    """Return the call that one JSON object holds, or None if it is malformed."""
    try:
        return [_named_arguments(msgspec.json.decode(text.strip(), type=_Body))]
    except (ValueError, RecursionError):
        return None


def json_calls(text: str) -> list[NamedArguments] | None:
    """Return the calls that a JSON array of such objects holds, or None if one of them is malformed."""
    try:
        return [_named_arguments(body) for body in msgspec.json.decode(text.strip(), type=list[_Body])]
    except (ValueError, RecursionError):
        return None


def json_arguments(text: str) -> str | None:
    """Return `text` if it is the JSON of an object, else None."""
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        return None
    return text


def _named_arguments(body: _Body) -> NamedArguments:
    raw = bytes(body.arguments) or bytes(body.parameters)
    msgspec.json.decode(raw, type=dict[str, Any])
    return body.name, raw.decode()
