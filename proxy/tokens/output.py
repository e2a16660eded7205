"""How a model's output is read: its reasoning, its text and its tool calls, as its chat template writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol, cast

import msgspec

from proxy.settings import ReasoningParserName, ToolParserName
from proxy.tokens import reasoning
from proxy.tokens.formats import TOOL_FORMATS, CallParser, ToolCall, ToolFormat, Tools
from proxy.tokens.reasoning import Reasoning, ReasoningParser

Event = str | Reasoning | ToolCall


class TemplateSources(Protocol):
    """What of a chat template tells the format."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The texts of its templates."""
        ...


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One per model. `tool_format` is None where calls are not looked for, `reasoning` false where thoughts are
    not."""

    tool_format: ToolFormat | None = None
    reasoning: bool = False

    @property
    def kept_texts(self) -> tuple[str, ...]:
        """Texts that decoding must not leave out where they are added tokens: the markers."""
        markers = self.tool_format.markers if self.tool_format is not None else ()
        return (*markers, reasoning.OPEN, reasoning.CLOSE) if self.reasoning else markers

    @property
    def call_end(self) -> str | None:
        """A stop string that ends the first call; None where the format has none."""
        return self.tool_format.call_end if self.tool_format is not None else None

    def opens_reasoning(self, prompt_tail: str) -> bool:
        """Whether an answer to a prompt that ends like this begins inside of a thought."""
        return self.reasoning and reasoning.opens_reasoning(prompt_tail)

    def begins_inside_thought(self, prompt_tail: str, prefill: str) -> bool:
        """The same for an answer whose beginning the request gives."""
        opened = self.opens_reasoning(prompt_tail) or prefill.lstrip().startswith(reasoning.OPEN)
        return self.reasoning and opened and reasoning.CLOSE not in prefill

    def start(self, *, calls_allowed: bool, in_reasoning: bool = False, tools: Tools | None = None) -> OutputParser:
        """A parser for one answer. `tools` are those of the request, where they are known: formats that write
        argument values as plain text look up there what they are."""
        return OutputParser(
            ReasoningParser(in_reasoning=in_reasoning) if self.reasoning else None,
            self.tool_format.parser(tools) if calls_allowed and self.tool_format is not None else None,
        )


class OutputParser:
    """One answer's reasoning, text and calls, in this order of being looked for. Any split of the text into pieces
    gives the same events, but for the split of text and of reasoning. Time and memory are linear in the text; nothing
    raises."""

    def __init__(self, thoughts: ReasoningParser | None, calls: CallParser | None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    @property
    def thinking(self) -> bool:
        """Whether what comes now is a thought."""
        return self._thoughts is not None and self._thoughts.thinking

    @property
    def may_think(self) -> bool:
        """Whether it is one, or may yet be."""
        return self._thoughts is not None

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._thoughts is None:
            return _joined(self._called([text]))
        events = self._thoughts.feed(text)
        if self._thoughts.over:
            self._thoughts = None
        return _joined(self._called(events))

    def finish(self) -> list[Event]:
        """What was held back, once no more text comes."""
        rest = self._called(self._thoughts.finish() if self._thoughts is not None else [])
        return _joined([*rest, *(self._calls.finish() if self._calls is not None else ())])

    def _called(self, events: Sequence[str | Reasoning]) -> list[Event]:
        if self._calls is None:
            return list(events)
        called: list[Event] = []
        for event in events:
            called += [event] if isinstance(event, Reasoning) else self._calls.feed(event)
        return called


def output_format(
    template: TemplateSources,
    *,
    tool_parser: ToolParserName = "auto",
    reasoning_parser: ReasoningParserName = "auto",
) -> OutputFormat:
    """As the template writes calls and thoughts, or as the run's settings say."""
    source = "\n".join(template.sources)
    name = _tool_format_of(source) if tool_parser == "auto" else tool_parser
    return OutputFormat(
        tool_format=TOOL_FORMATS.get(name) if name is not None else None,
        reasoning=reasoning.CLOSE in source if reasoning_parser == "auto" else reasoning_parser == "think",
    )


def _tool_format_of(source: str) -> str | None:
    """By the markers in the template's text. `<tool_call>` alone says little: GLM writes other things behind it."""
    if "<tool_call>" in source:
        if "<function=" in source and "<parameter=" in source:
            return "qwen3_coder"
        return None if "<arg_key>" in source else "hermes"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    llama = "<|start_header_id|>" in source and '"parameters"' in source
    return "llama3_json" if llama or "<|python_tag|>" in source else None


def _joined(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of text, and of reasoning, as one; empty ones left out."""
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
