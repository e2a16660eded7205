"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


def partial_marker(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class StopTrimmer:
    """Cuts a stream of text at the first stop string, which is not part of the answer.

    Only text that may be the beginning of a stop string is held back. The first stop string is the one that is
    complete first, so that the split of the text into pieces does not matter; if several end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that ended the text, or None while the text goes on."""

    def feed(self, text: str) -> str:
        """Return the text that can be shown; nothing behind a stop string."""
        if self.stopped_by is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            _, start, self.stopped_by = min(found)
            released, self._held = self._held[:start], ""
            return released
        keep = max(partial_marker(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def finish(self) -> str:
        """Return the text that was held back for a stop string that did not come."""
        released, self._held = self._held, ""
        return released
