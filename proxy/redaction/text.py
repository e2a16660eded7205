"""Redact texts and JSON values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from proxy.redaction.rules import Found, Rule, found_in

# Rounds of replacement. The text around a replaced range may match anew; after these rounds all of it is replaced.
_ROUNDS = 4

# Fields that connect messages and calls. A redacted id would disconnect a tool result from its call.
_UNTOUCHED_KEYS = frozenset({"id", "tool_call_id", "call_id", "role", "type"})


class TextRedactor:
    """Redactor of texts and JSON values by rules."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)

    def found(self, text: str) -> list[Found]:
        return found_in(text, self.rules)

    def text(self, text: str) -> str:
        """Replace each found range by the mark `[rule]`, until the rules find nothing outside the marks."""
        parts: list[tuple[str, bool]] = [(text, False)]
        for _ in range(_ROUNDS):
            whole = "".join(part for part, _ in parts)
            found = [one for one in self.found(whole) if not _is_in_mark(one, parts)]
            if not found:
                return whole
            parts = _replaced(whole, found, parts)
        return "[redacted]"

    def value(self, value: Any) -> Any:
        """Redact a JSON value and its keys. Return the same object if nothing was found."""
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, list):
            changed = [self.value(one) for one in value]
            return value if all(new is old for new, old in zip(changed, value, strict=True)) else changed
        if isinstance(value, dict):
            pairs = [
                (self.text(key), one if key in _UNTOUCHED_KEYS else self.value(one)) for key, one in value.items()
            ]
            same = all(key == old and new is value[old] for (key, new), old in zip(pairs, value, strict=True))
            return value if same else dict(pairs)
        return value

    def _string(self, text: str) -> str:
        """Redact a string. If it is JSON with escapes (a call's arguments), redact the decoded value as well.

        An escape could otherwise hide a match: `a\\u0040b.com` is an email address.
        """
        if text[:1] in ("{", "[") and "\\" in text:
            try:
                decoded = json.loads(text)
            except (ValueError, RecursionError):
                decoded = None
            changed = self.value(decoded)
            if changed is not decoded:
                text = json.dumps(changed, ensure_ascii=False)
        redacted = self.text(text)
        return text if redacted == text else redacted


def _is_in_mark(one: Found, parts: Sequence[tuple[str, bool]]) -> bool:
    at = 0
    for part, is_mark in parts:
        if is_mark and at <= one.start and one.end <= at + len(part):
            return True
        at += len(part)
    return False


def _replaced(whole: str, found: Sequence[Found], parts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return text and marks in turn, each with whether it is a mark.

    A mark of an earlier round stays a mark unless a found range overlaps it.
    """
    marks: list[tuple[int, int, str]] = [(one.start, one.end, f"[{one.rule}]") for one in found]
    at = 0
    for part, is_mark in parts:
        if is_mark and not any(start < at + len(part) and at < end for start, end, _ in marks):
            marks.append((at, at + len(part), part))
        at += len(part)
    replaced: list[tuple[str, bool]] = []
    at = 0
    for start, end, mark in sorted(marks):
        replaced += [(whole[at:start], False), (mark, True)]
        at = end
    return [*replaced, (whole[at:], False)]
