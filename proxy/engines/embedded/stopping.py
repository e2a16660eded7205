"""Find stop strings in generated tokens, also stop strings that span several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class StopStrings:
    """The stop strings of one request.

    Each step decodes only the tail. A token stands for at least one byte, so a match that ends in the newest token
    began at most as many tokens ago as the stop string has UTF-8 bytes. One more token in front keeps the match away
    from the first token, whose leading space some decoders strip.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._window = max((len(stop.encode()) for stop in stops), default=0) + 1

    def matched(self, output_ids: Sequence[int]) -> str | None:
        """Return the stop string that the newest token completed; None without one."""
        text = self._decode(output_ids[-self._window :])
        return next((stop for stop in self._stops if stop in text), None)
