"""Reading text that comes in pieces of any size, in time linear in it, so that the pieces make no difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_SPACE = re.compile(r"\s*")
_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_INSIDE_STRING = re.compile(r'["\\]')


class Scanner:
    """Steps over a window of text that holds what came and was not yet understood.

    A step (`_step`) consumes what it can and gives True, or gives False when it needs more text. What it leaves in
    the window is never longer than the markers that it looks for; everything else moves into lists, which are joined
    once.
    """

    def __init__(self) -> None:
        self._window = ""
        self._at = 0
        self._step: Callable[[], bool]

    def _scan(self, text: str) -> None:
        self._window = self._window[self._at :] + text
        self._at = 0
        while self._step():
            pass

    def _take(self, end: int, into: list[str]) -> None:
        """Consumes the window up to `end`."""
        if end > self._at:
            into.append(self._window[self._at : end])
            self._at = end

    def _take_space(self, into: list[str]) -> None:
        self._take(self._match(_SPACE), into)

    def _match(self, pattern: re.Pattern[str]) -> int:
        """Where `pattern`, which begins here and may be empty, ends."""
        found = pattern.match(self._window, self._at)
        return found.end() if found is not None else self._at

    def _take_until(self, marker: str, into: list[str]) -> bool:
        """Consumes what is before `marker`. False when it has not come yet; then what may be its beginning stays."""
        start = self._window.find(marker, self._at)
        found = start >= 0
        self._take(start if found else len(self._window) - self._partial((marker,)), into)
        return found

    def _partial(self, markers: Iterable[str]) -> int:
        """Length of the window's end that may be the beginning of one of `markers`."""
        window, longest = self._window, 0
        for marker in markers:
            start = window.find(marker[0], max(self._at, len(window) - len(marker) + 1))
            while start >= 0 and not marker.startswith(window[start:]):
                start = window.find(marker[0], start + 1)
            if start >= 0:
                longest = max(longest, len(window) - start)
        return longest

    def _next(self, texts: tuple[str, ...]) -> str | None:
        """Which of `texts` stands here: empty for none of them, None when it takes more text to say. Of two that
        begin alike the longer one is given first."""
        for text in texts:
            if self._window.startswith(text, self._at):
                return text
            if text.startswith(self._window[self._at : self._at + len(text)]):
                return None
        return ""


class JsonEnd:
    """Looks for the end of one JSON object or array. Whether it is valid is not looked at, only its brackets."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def find(self, text: str, at: int) -> int | None:
        """The place behind the closing bracket; None when `text`, which was looked at from `at` on, ends before."""
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
