"""Tool calls as they are told, and what all formats share: the text around calls, and JSON of name and arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from proxy.tokens.scanning import Scanner

Tools = Sequence[Mapping[str, Any]]
"""In the shape of chat completions: `{"type": "function", "function": {"name", "parameters"}}`."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is the JSON text of an object: the model's own, not a rewriting, where it wrote JSON. `index`
    counts the calls of an answer from 0."""

    index: int
    name: str
    arguments: str


Event = str | ToolCall

_LONGEST_NAME = 256

NamedArguments = tuple[str, str]
"""A call's name, and the JSON text of its arguments."""


class CallParser(Scanner):
    """One answer's text and calls.

    Text passes as it comes; only what may be the beginning of a call is held back (and white space before it, which
    belongs to the call's layout). A call is given whole, once its end came and it proved valid. Anything else comes
    back as the text that it is; nothing here raises. To stream arguments before their end is known would make a
    malformed call impossible to take back.
    """

    opening: ClassVar[tuple[str, ...]]
    """What a call begins with."""
    separator: ClassVar[str] = ""
    """A sign that may stand behind a call and says nothing."""

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__()
        self._tools = tools or ()
        self._opens = re.compile("|".join(map(re.escape, self.opening)))
        self._space: list[str] = []
        self._call: list[str] = []
        self._told: list[Event] = []
        self._count = 0
        self._name = ""
        self._step = self._text

    def feed(self, text: str) -> list[Event]:
        self._scan(text)
        told, self._told = self._told, []
        return told

    def finish(self) -> list[Event]:
        """What was held back: an unfinished call is text; white space behind the last call is nothing."""
        rest = "".join([*self._space, *self._call, *self._unsettled(), self._window[self._at :]])
        self._space, self._call, self._window, self._at = [], [], "", 0
        layout = rest.replace(self.separator, "") if self.separator else rest
        return [rest] if rest and (layout.strip() or not self._count) else []

    def _text(self) -> bool:
        """Text before the next call."""
        found = self._opens.search(self._window, self._at)
        if found is None:
            self._pass(len(self._window) - self._partial(self.opening))
            return False
        self._pass(found.start())
        self._take(found.end(), self._call)
        self._opened(found[0])
        return True

    def _pass(self, end: int) -> None:
        """Tells the text up to `end`, without white space that may belong to a call."""
        text = self._window[self._at : end]
        self._at = end
        kept = text.rstrip()
        if kept:
            self._told.append("".join([*self._space, kept]))
            self._space = []
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def _take_name(self, allowed: re.Pattern[str]) -> str | None:
        """Consumes a name, which `_name` holds as far as it came: the whole of it once something else follows, empty
        when it is longer than names are, None before."""
        end = self._match(allowed)
        self._name += self._window[self._at : end]
        self._take(end, self._call)
        if len(self._name) > _LONGEST_NAME:
            return ""
        return None if self._at == len(self._window) else self._name

    def _unsettled(self) -> list[str]:
        """What was consumed of the call and is in none of the lists here."""
        return []

    def _opened(self, marker: str) -> None:
        """Chooses the step behind `marker`, which begins a call."""
        raise NotImplementedError

    def _give_back(self) -> bool:
        """What looked like a call is text."""
        self._told.append("".join([*self._space, *self._call]))
        self._space, self._call = [], []
        self._step = self._text
        return True

    def _settle(self, calls: Sequence[NamedArguments] | None) -> bool:
        """The call has ended: it is `calls`, or malformed."""
        if not calls:
            return self._give_back()
        for name, arguments in calls:
            self._told.append(ToolCall(index=self._count, name=name, arguments=arguments))
            self._count += 1
        self._space, self._call = [], []
        self._step = self._text
        return True


class _Body(msgspec.Struct):
    """Llama says `parameters`. Whatever else is written beside (an id, a type) is passed over."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def json_call(text: str) -> list[NamedArguments] | None:
    """A call written as one JSON object; None when it is malformed."""
    try:
        return [_named_arguments(msgspec.json.decode(text.strip(), type=_Body))]
    except (ValueError, RecursionError):
        return None


def json_calls(text: str) -> list[NamedArguments] | None:
    """Calls written as a JSON array of such objects; None when one of them is malformed."""
    try:
        return [_named_arguments(body) for body in msgspec.json.decode(text.strip(), type=list[_Body])]
    except (ValueError, RecursionError):
        return None


def json_arguments(text: str) -> str | None:
    """`text` when it is the JSON of an object."""
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        return None
    return text


def _named_arguments(body: _Body) -> NamedArguments:
    raw = bytes(body.arguments) or bytes(body.parameters)
    msgspec.json.decode(raw, type=dict[str, Any])
    return body.name, raw.decode()
