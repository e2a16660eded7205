"""A scanner for text that arrives in pieces: linear in the text, with the same result for every split into pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_SPACE = re.compile(r"\s*")
_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_INSIDE_STRING = re.compile(r'["\\]')


class Scanner:
    """A state machine over a window of text: the part of the input that is not yet consumed.

    The current state is the method `_step`. It consumes what it can and returns True, or returns False if it needs
    more text.
    """

    # A step leaves at most the length of its longest marker in the window; everything else moves into lists, which
    # are joined once. Copying or searching the held text with every piece would be quadratic.

    def __init__(self) -> None:
        self._window = ""
        self._at = 0
        self._step: Callable[[], bool]

    def _scan(self, text: str) -> None:
        self._window = self._window[self._at :] + text
        self._at = 0
        while self._step():
            pass

    def _consume(self, end: int, into: list[str]) -> None:
        """Move the window's text up to `end` to `into`."""
        if end > self._at:
            into.append(self._window[self._at : end])
            self._at = end

    def _consume_space(self, into: list[str]) -> None:
        self._consume(self._match(_SPACE), into)

    def _match(self, pattern: re.Pattern[str]) -> int:
        """Return the end of the match of `pattern`, which may be empty, at the current position."""
        found = pattern.match(self._window, self._at)
        return found.end() if found is not None else self._at

    def _consume_until(self, marker: str, into: list[str]) -> bool:
        """Move the text before `marker` to `into`. Return False if the marker has not come yet; then the text that
        may be its beginning stays in the window."""
        start = self._window.find(marker, self._at)
        found = start >= 0
        self._consume(start if found else len(self._window) - self._partial((marker,)), into)
        return found

    def _partial(self, markers: Iterable[str]) -> int:
        """Return the length of the window's longest end that may be the beginning of one of `markers`."""
        window, longest = self._window, 0
        for marker in markers:
            start = window.find(marker[0], max(self._at, len(window) - len(marker) + 1))
            while start >= 0 and not marker.startswith(window[start:]):
                start = window.find(marker[0], start + 1)
            if start >= 0:
                longest = max(longest, len(window) - start)
        return longest

    def _next(self, texts: tuple[str, ...]) -> str | None:
        """Return the one of `texts` at the current position, an empty text if none of them is there, or None if more
        text is needed to decide. If one of `texts` begins with another, list the longer one first."""
        for text in texts:
            if self._window.startswith(text, self._at):
                return text
            if text.startswith(self._window[self._at : self._at + len(text)]):
                return None
        return ""


class JsonEnd:
    """Finds the end of one JSON object or array that arrives in pieces. It counts brackets outside of strings and
    does not check that the JSON is valid."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def find(self, text: str, at: int) -> int | None:
        """Return the index behind the closing bracket, or None if `text`, read from index `at`, ends before it."""
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while True:
            found = (_INSIDE_STRING if self._quoted else _OUTSIDE_STRING).search(text, at)
            if found is None:
                return None
            at = found.end()
            sign = found[0]
            if sign == "\\":
                self._escaped = at == len(text)
                at += 1
            elif sign == '"':
                self._quoted = not self._quoted
            elif sign in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return at
