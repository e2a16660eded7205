"""Stop strings: text up to the first one, holding back only what may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


def partial_marker(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, shorter than the whole of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class StopTrimmer:
    """Cuts a stream of text at the first stop string, which is not part of the answer.

    The first is the one that is complete first, so that the split of the text into pieces does not matter; of those
    that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that ended the text; None as long as none did."""

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def feed(self, text: str) -> str:
        if self.stopped:
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
        """What was held back for a stop string that did not come."""
        released, self._held = self._held, ""
        return released
