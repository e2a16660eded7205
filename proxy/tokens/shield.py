"""Marking of the places in a text that could form a control token (`control_tokens` explains marks)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

# Characters searched in one call, which takes some milliseconds at worst and blocks other threads meanwhile.
_PIECE = 1 << 16

_Value = TypeVar("_Value")


class Shield:
    """Marks texts that could form one of `tokens`, whole or in part.

    A template joins contents with each other and with its own text. So a content is marked where it holds a token,
    ends with the beginning of one, begins with the end of one, or is the middle of one whose beginning is in
    `constants`, the template's own texts. White space at the ends is ignored, because templates strip it. A mark
    alone changes nothing: only the complete text of a token is spelled with ordinary tokens.

    `normalised` is the tokenizer's normaliser, if it can turn other characters into a token (`＜` into `<`).
    """

    def __init__(
        self,
        tokens: Collection[str],
        marks: Mapping[str, str],
        constants: Collection[str],
        normalised: Callable[[str], str] | None,
    ) -> None:
        self._marks = marks
        self._normalised = normalised
        self._whole = any_of(tokens)
        # Built once for each token: a body may hold millions of occurrences.
        self._marked = {token: marks[token[0]] + token[1:] for token in tokens}
        self._longest = max(map(len, tokens), default=0)
        self._edges = tuple(sorted({token[0] for token in tokens} | {token[-1] for token in tokens}))
        self._beginnings = frozenset(token[:cut] for token in tokens for cut in range(1, len(token)))
        self._ends = frozenset(token[cut:] for token in tokens for cut in range(1, len(token)))
        # A template compares contents with its own words ("function", "object"): a mark would make them unequal.
        self._middles = frozenset(_middles(tokens, constants)) - frozenset(constants)

    def value(self, value: _Value) -> _Value:
        """Return a JSON value with all of its texts marked, keys too; the same object if nothing needs a mark."""
        marked: Any = value
        if isinstance(value, str):
            marked = self.text(value)
        elif isinstance(value, Mapping):
            pairs = {self.text(key): self.value(one) for key, one in value.items()}
            if any(key not in value or value[key] is not one for key, one in pairs.items()):
                marked = pairs
        elif isinstance(value, list | tuple):
            items = [self.value(one) for one in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                marked = items
        return marked  # type: ignore[no-any-return]

    def text(self, text: str) -> str:
        """Return `text` with marks; the same object if it needs none."""
        if self._normalised is None and not self._may_hold_edge(text):
            stripped = text.strip()
            if len(stripped) >= self._longest or stripped not in self._middles:
                return text
        if self._normalised is not None:
            text = self._as_tokenised(text)
        marked = self._mark_whole(text)
        for place in self._places_at_edges(text):
            marked = marked[:place] + self._marks[text[place]] + marked[place + 1 :]
        return marked if marked != text else text

    def _may_hold_edge(self, text: str) -> bool:
        # A loop over two or three characters: a generator would cost more than the search, which every content takes.
        for edge in self._edges:  # noqa: SIM110
            if edge in text:
                return True
        return False

    def _mark_whole(self, text: str) -> str:
        """Mark the whole tokens in `text`, piece by piece: a search holds the interpreter's lock, and searching a
        whole body at once would delay other calls."""
        parts: list[str] = []
        at = 0
        for start in range(0, len(text), _PIECE):
            for found in self._whole.finditer(text, max(at, start), start + _PIECE + self._longest):
                if found.start() >= start + _PIECE:
                    break
                if found.start() > at:
                    parts.append(text[at : found.start()])
                parts.append(self._marked[found[0]])
                at = found.end()
        return "".join([*parts, text[at:]]) if parts else text

    def _as_tokenised(self, text: str) -> str:
        """Return the normalised text if it holds more tokens than `text` does, else `text`. Both have the same
        ids."""
        assert self._normalised is not None
        normal = self._normalised(text)
        count = len(self._whole.findall(text)) + len(self._places_at_edges(text))
        return normal if len(self._whole.findall(normal)) + len(self._places_at_edges(normal)) > count else text

    def _places_at_edges(self, text: str) -> set[int]:
        """Return the indices of the characters to mark at the ends of `text`."""
        end, longest = len(text.rstrip()), self._longest
        start = len(text) - len(text.lstrip())
        places = {at for at in range(max(start, end - longest), end) if text[at:end] in self._beginnings}
        behind = min(end, start + longest)
        places.update(at - 1 for at in range(start + 1, behind + 1) if text[start:at] in self._ends)
        if end - start < longest and text[start:end] in self._middles:
            places.add(start)
        return places


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of `texts`, the longest first, as tokenizers find added tokens."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _middles(tokens: Iterable[str], constants: Iterable[str]) -> Iterable[str]:
    """Yield the parts of tokens that complete a beginning which the template's own text may have written before."""
    by_last: dict[str, list[str]] = {}
    for constant in constants:
        by_last.setdefault(constant[-1], []).append(constant)
    for token in tokens:
        for start in range(1, len(token) - 1):
            beginning = token[:start]
            if any(end.endswith(beginning) or beginning.endswith(end) for end in by_last.get(beginning[-1], ())):
                yield from (token[start:end] for end in range(start + 1, len(token)))
