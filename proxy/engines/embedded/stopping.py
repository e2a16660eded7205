"""Finds stop strings in what a request has generated, also where one spans several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class StopStrings:
    """The stop strings of one request.

    Only the tail is decoded at each step: a match that ends in the newest token began at most as many tokens ago as
    it has UTF-8 bytes, since a token stands for one byte at least; one token more in front keeps a decoder's
    treatment of the first token (some strip its leading space) out of the match.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._window = max((len(stop.encode()) for stop in stops), default=0) + 1

    def matched(self, output_ids: Sequence[int]) -> str | None:
        """The stop string that the newest token completed."""
        text = self._decode(output_ids[-self._window :])
        return next((stop for stop in self._stops if stop in text), None)
