"""The interface of a tool-call format: detection, parsing and grammar."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from proxy.grammars.nodes import Node, tags_with_separator, triggered_tags
from proxy.grammars.schemas import SchemaRefused
from proxy.tokens.formats.parsing import CallParser, Tools

_PLAIN_NAME = re.compile(r"""[^\s<>\[\]{}"]{1,128}""")


class AllowedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call, and the JSON schema of its arguments.

    With `strict` the request asks for the whole schema to be enforced: a format that cannot do so refuses it.
    Otherwise a format enforces as much of the schema as it can.
    """

    name: str
    schema: dict[str, Any]
    strict: bool


class ToolFormat(ABC):
    """One way of writing tool calls. Instances are stateless and shared by all calls."""

    name: ClassVar[str]
    """The value of the setting `run.tool_parser` that selects this format."""
    markers: ClassVar[tuple[str, ...]]
    """Texts that surround calls. Where they are added tokens, decoding must not drop them."""
    call_end: ClassVar[str | None] = None
    """A text that ends every call and appears nowhere else, usable as a stop string; None if there is none."""
    trigger: ClassVar[str]
    """The text that begins a call. In constrained answers nothing else may begin with it."""
    separator: ClassVar[str] = ""
    """The text between two calls of one answer."""

    @abstractmethod
    def writes(self, template: str) -> bool:
        """Return whether a chat template with this source writes calls in this format."""

    def for_template(self, template: str) -> ToolFormat:
        """Return the variant of this format that a template uses; formats without variants return themselves."""
        return self

    @abstractmethod
    def parser(self, tools: Tools | None = None) -> CallParser:
        """Return a parser for one answer. `tools` are the request's; formats that write argument values as plain text
        take the values' types from them."""

    @abstractmethod
    def call_tag(self, call: AllowedCall) -> Node:
        """Return the structural tag of one call, without separators. Raise SchemaRefused for a strict schema or a
        name that this format cannot write."""

    def only_calls(self, calls: Sequence[AllowedCall], *, parallel: bool) -> Node:
        """Return the grammar of an answer that is one call or, with `parallel`, one or more, and nothing else. Raise
        SchemaRefused as `call_tag` does."""
        return tags_with_separator([self.call_tag(call) for call in calls], self.separator, parallel=parallel)

    def text_or_calls(self, calls: Sequence[AllowedCall], *, parallel: bool, excludes: Sequence[str]) -> Node:
        """Return the grammar of text without any of `excludes`, in which whatever begins like a call is an allowed
        call. Raise SchemaRefused as `call_tag` does."""
        tags = [self.call_tag(call) for call in calls]
        return triggered_tags(self.trigger, tags, parallel=parallel, excludes=excludes)


def check_plain_name(call: AllowedCall) -> None:
    """Raise SchemaRefused for a name that would run into the markup of a format which writes names without quotes."""
    if not _PLAIN_NAME.fullmatch(call.name):
        raise SchemaRefused((), "the model writes names without white space, brackets and quotes")
