"""Feed parsers text in pieces, and join the resulting events."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from proxy.tokens.formats import ToolCall
from proxy.tokens.output import Event
from proxy.tokens.reasoning import Reasoning


class Parser(Protocol):
    def feed(self, text: str, /) -> Sequence[Event]: ...

    def finish(self) -> Sequence[Event]: ...


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def told(parser: Parser, pieces: Sequence[str]) -> list[Event]:
    """Return all events, with neighbouring pieces of text and of reasoning joined."""
    joined: list[Event] = []
    for event in [*itertools.chain.from_iterable(map(parser.feed, pieces)), *parser.finish()]:
        last = joined[-1] if joined else None
        if isinstance(event, str) and isinstance(last, str):
            joined[-1] = last + event
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        elif event:
            joined.append(event)
    return joined


def text_and_calls(events: Sequence[Event]) -> tuple[str, list[ToolCall]]:
    text = "".join(event for event in events if isinstance(event, str))
    return text, [event for event in events if isinstance(event, ToolCall)]
