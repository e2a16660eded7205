"""Constructors for the nodes of a structural tag (`proxy.grammars.structural_tag` describes the language)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Node = dict[str, Any]

MOST_WHITESPACE = 20
"""Characters of white space allowed in one place of constrained JSON. Small models tend to emit line breaks for ever
where a grammar allows any number of them."""


def json_value(schema: Mapping[str, Any]) -> Node:
    """JSON that matches `schema`."""
    return {"type": "json_schema", "json_schema": dict(schema), "max_whitespace_cnt": MOST_WHITESPACE}


def xml_parameters(schema: Mapping[str, Any]) -> Node:
    """The properties of an object of `schema`, written as Qwen3-Coder's `<parameter=key>` elements."""
    return {**json_value(schema), "style": "qwen_xml"}


def text(value: str) -> Node:
    """Exactly this text."""
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Node:
    """Text that matches `pattern` as a whole."""
    return {"type": "regex", "pattern": pattern}


def any_text(*excludes: str) -> Node:
    """Any text that contains none of `excludes`."""
    return {"type": "any_text", "excludes": list(excludes)}


def sequence(*elements: Node) -> Node:
    """All of `elements`, one after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Node) -> Node:
    """One of `elements`."""
    return {"type": "or", "elements": list(elements)}


def optional(content: Node) -> Node:
    """`content` or nothing."""
    return {"type": "optional", "content": content}


def tag(begin: str, content: Node, end: str) -> Node:
    """`content` between two fixed texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags_with_separator(tags: Sequence[Node], separator: str, *, parallel: bool) -> Node:
    """One of `tags` or, with `parallel`, one or more of them joined by `separator`."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def triggered_tags(trigger: str, tags: Sequence[Node], *, parallel: bool, excludes: Sequence[str]) -> Node:
    """Text without any of `excludes`, in which whatever begins with `trigger` is one of `tags`. Without `parallel`
    the answer ends behind the first tag."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(tags),
        "stop_after_first": not parallel,
        "excludes": list(excludes),
    }
