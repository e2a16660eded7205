"""Escaping of control characters in foreign text that is printed on a terminal.

A reward's comment, a tool's result or another server's error may hold `ESC ] 0 ;`, with which a terminal changes its
title, or sequences that move the cursor, overwrite lines or write to the clipboard. Direction marks reorder the text
that a person reads.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

_INVISIBLE = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks, embeddings, overrides and isolates of direction
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # halves of pairs, which no terminal's encoding takes
)
_MANY_LINES = re.compile(f"[{_INVISIBLE}]")
_ONE_LINE = re.compile(f"[{_INVISIBLE}\n]")


def visible(text: str, *, one_line: bool = False) -> str:
    """Return `text` with control characters escaped as in JSON, `\\u001b`. Tabs stay, and so do line feeds unless
    `one_line`. A JSON document stays one with the same content."""
    return (_ONE_LINE if one_line else _MANY_LINES).sub(_escaped, text)


def visible_values(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape every text of a log event; a structlog processor. Line feeds stay only in `exception`, a traceback:
    elsewhere they would let a message forge the next line of the log."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = visible(value, one_line=name != "exception")
    return event


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
