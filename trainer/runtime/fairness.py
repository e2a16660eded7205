"""The choice of the next run, among runs that one process trains, by shares of time in proportion to their weights.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) with runs as flows and seconds as lengths. A step is never
interrupted, so shares are as the weights say to within a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class FairShare:
    """The seconds that each run has had, divided by its weight, which `choose` evens out.

    If two runs have a batch at every choice, their seconds per weight differ by at most the longest step of either,
    divided by its weight. A run without a batch gets no credit for the time in which others trained.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights: dict[str, float] = {}
        self._had: dict[str, float] = {}
        self._served: dict[str, int] = {}
        self._contending: set[str] = set()
        self._now = 0.0
        """Seconds per weight that the last chosen run had had when it was chosen."""
        for run, weight in (weights or {}).items():
            self.join(run, weight)

    def join(self, run: str, weight: float = 1.0) -> None:
        """Add a run with a positive weight. It gets no credit for the time before."""
        self._weights[run], self._had[run], self._served[run] = weight, self._now, 0

    def choose(self, ready: Collection[str], undecided: Collection[str] = ()) -> str | None:
        """Return the run of `ready` with the fewest seconds per weight; among equals, the one whose last turn is
        longest ago. Return None if there is none, or if one of the `undecided`, which may soon have a batch, would
        come before all of them."""
        contending = {*ready, *undecided}
        for run in contending - self._contending:
            self._had[run] = max(self._had[run], self._now)
        self._contending = contending
        in_order = [run for run in self._had if run in contending]
        first = min(in_order, key=lambda run: (self._had[run], self._served[run]), default=None)
        if first is None or first not in ready:
            return None
        self._now = self._had[first]
        self._served[first] = 1 + max(self._served.values())
        return first

    def spend(self, run: str, seconds: float) -> None:
        """Add seconds to a run's share, whether they were of use or not."""
        self._had[run] += seconds / self._weights[run]

    def leave(self, run: str) -> None:
        """Remove a run that is no longer trained."""
        del self._weights[run], self._had[run], self._served[run]
        self._contending.discard(run)
