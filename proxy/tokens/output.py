"""The format of a model's output, and its parsing into reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol, cast

import msgspec

from proxy.settings import ReasoningParserName
from proxy.tokens import reasoning
from proxy.tokens.formats import CallParser, ToolCall, ToolFormat, Tools, tool_format_for
from proxy.tokens.reasoning import Reasoning, ReasoningParser

Event = str | Reasoning | ToolCall


class TemplateSources(Protocol):
    """The part of a chat template from which the output format is detected."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The Jinja sources of its templates."""
        ...


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The output format of one model. With `tool_format` None, calls stay text; without `reasoning`, thoughts do."""

    tool_format: ToolFormat | None = None
    reasoning: bool = False

    @property
    def kept_texts(self) -> tuple[str, ...]:
        """Markers that decoding must not drop where they are added tokens."""
        markers = self.tool_format.markers if self.tool_format is not None else ()
        return (*markers, reasoning.OPEN, reasoning.CLOSE) if self.reasoning else markers

    @property
    def call_end(self) -> str | None:
        """A stop string that ends the first call; None where the format has none."""
        return self.tool_format.call_end if self.tool_format is not None else None

    def opens_reasoning(self, prompt_tail: str) -> bool:
        """Return whether the answer to a prompt with this end begins inside of a thought."""
        return self.reasoning and reasoning.opens_reasoning(prompt_tail)

    def begins_inside_thought(self, prompt_tail: str, prefill: str) -> bool:
        """Return whether the model goes on inside of a thought, behind a prompt with this end and an answer whose
        beginning, `prefill`, the request provides."""
        opened = self.opens_reasoning(prompt_tail) or prefill.lstrip().startswith(reasoning.OPEN)
        return self.reasoning and opened and reasoning.CLOSE not in prefill

    def start(self, *, calls_allowed: bool, in_reasoning: bool = False, tools: Tools | None = None) -> OutputParser:
        """Return a parser for one answer. `tools` are the request's, if known: formats that write argument values as
        plain text take the values' types from them."""
        return OutputParser(
            ReasoningParser(in_reasoning=in_reasoning) if self.reasoning else None,
            self.tool_format.parser(tools) if calls_allowed and self.tool_format is not None else None,
        )


class OutputParser:
    """Splits one answer into reasoning, text and calls.

    Reasoning is separated first, and calls are parsed in the rest. Every split of the text into pieces gives the same
    events, except that pieces of text and of reasoning are split differently. Time and memory are linear in the text.
    Nothing raises.
    """

    def __init__(self, thoughts: ReasoningParser | None, calls: CallParser | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to a thought."""
        return self._thoughts is not None and self._thoughts.thinking

    @property
    def may_think(self) -> bool:
        """Whether the next text belongs to a thought or may turn out to begin one."""
        return self._thoughts is not None

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""
        if not text:
            return []
        if self._thoughts is None:
            return _joined(self._with_calls([text]))
        events = self._thoughts.feed(text)
        if self._thoughts.over:
            self._thoughts = None
        return _joined(self._with_calls(events))

    def finish(self) -> list[Event]:
        """Return the events that were held back, once the answer is over."""
        rest = self._with_calls(self._thoughts.finish() if self._thoughts is not None else [])
        return _joined([*rest, *(self._calls.finish() if self._calls is not None else ())])

    def _with_calls(self, events: Sequence[str | Reasoning]) -> list[Event]:
        if self._calls is None:
            return list(events)
        parsed: list[Event] = []
        for event in events:
            parsed += [event] if isinstance(event, Reasoning) else self._calls.feed(event)
        return parsed


def output_format(
    template: TemplateSources, *, tool_parser: str = "auto", reasoning_parser: ReasoningParserName = "auto"
) -> OutputFormat:
    """Return the format of a model's output, detected in its chat template or set by `run.tool_parser` and
    `run.reasoning_parser`. Raise ConfigurationError for a tool parser that does not exist."""
    source = "\n".join(template.sources)
    return OutputFormat(
        tool_format=tool_format_for(source, tool_parser),
        reasoning=reasoning.CLOSE in source if reasoning_parser == "auto" else reasoning_parser == "think",
    )


def _joined(events: list[Event]) -> list[Event]:
    """Return the events with adjacent pieces of text, and of reasoning, joined and empty ones dropped."""
    if len(events) == 1 and events[0]:
        return events
    joined: list[Event] = []
    for kind, group in groupby(events, type):
        if kind is str:
            text = "".join(cast("Iterator[str]", group))
            joined += [text] if text else []
        elif kind is Reasoning:
            joined.append(Reasoning("".join(piece.text for piece in cast("Iterator[Reasoning]", group))))
        else:
            joined += group
    return joined
