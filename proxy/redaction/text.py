"""Texts and JSON without what the rules find."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from proxy.redaction.rules import Found, Rule, found_in

_ROUNDS = 4
"""What is left of a text may match anew; after so many rounds all of it goes."""
_KEPT_KEYS = frozenset({"id", "tool_call_id", "call_id", "role", "type"})
"""Of messages, what holds them together."""


class TextRedactor:
    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)

    def found(self, text: str) -> list[Found]:
        return found_in(text, self.rules)

    def text(self, text: str) -> str:
        """With `[rule]` where something was found. Afterwards nothing is found but in these marks."""
        parts: list[tuple[str, bool]] = [(text, False)]
        for _ in range(_ROUNDS):
            whole = "".join(part for part, _ in parts)
            found = [one for one in self.found(whole) if not _within_marks(one, parts)]
            if not found:
                return whole
            parts = _replaced(whole, found, parts)
        return "[redacted]"

    def value(self, value: Any) -> Any:
        """JSON, its keys too; where nothing is found, the same object."""
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, list):
            changed = [self.value(one) for one in value]
            return value if all(new is old for new, old in zip(changed, value, strict=True)) else changed
        if isinstance(value, dict):
            pairs = [(self.text(key), one if key in _KEPT_KEYS else self.value(one)) for key, one in value.items()]
            same = all(key == old and new is value[old] for (key, new), old in zip(pairs, value, strict=True))
            return value if same else dict(pairs)
        return value

    def _string(self, text: str) -> str:
        """JSON in a string (a call's arguments) is looked through as what it stands for, too."""
        if text[:1] in ("{", "[") and "\\" in text:
            try:
                held = json.loads(text)
            except (ValueError, RecursionError):
                held = None
            changed = self.value(held)
            if changed is not held:
                text = json.dumps(changed, ensure_ascii=False)
        redacted = self.text(text)
        return text if redacted == text else redacted


def _within_marks(one: Found, parts: Sequence[tuple[str, bool]]) -> bool:
    at = 0
    for part, is_mark in parts:
        if is_mark and at <= one.start and one.end <= at + len(part):
            return True
        at += len(part)
    return False


def _replaced(whole: str, found: Sequence[Found], parts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Text and marks in turn; marks of earlier rounds stay marks where nothing is found across them."""
    marks: list[tuple[int, int, str]] = [(one.start, one.end, f"[{one.rule}]") for one in found]
    at = 0
    for part, is_mark in parts:
        if is_mark and not any(start < at + len(part) and at < end for start, end, _ in marks):
            marks.append((at, at + len(part), part))
        at += len(part)
    made: list[tuple[str, bool]] = []
    at = 0
    for start, end, mark in sorted(marks):
        made += [(whole[at:start], False), (mark, True)]
        at = end
    return [*made, (whole[at:], False)]
