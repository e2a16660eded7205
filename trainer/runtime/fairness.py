"""Whose turn it is, of runs that are trained by one process: shares of time, not of steps.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) with runs for flows and seconds for lengths. A step is never
broken off, so shares are equal to within a step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class FairShare:
    """The seconds that each run has had, which `choose` evens out.

    Of two runs that both have a batch at every choice, none is ahead by more than the longest step of theirs. A run
    that had none is taken to have had as much as whoever trained meanwhile: what it did not use then is nobody's.
    """

    def __init__(self, runs: Sequence[str]) -> None:
        self._had = dict.fromkeys(runs, 0.0)
        self._served = dict.fromkeys(runs, 0)
        self._contending: set[str] = set()
        self._now = 0.0
        """What the run that was chosen last had had before."""

    def choose(self, ready: Collection[str], undecided: Collection[str] = ()) -> str | None:
        """The one of `ready` that has had the least; of several, the one whose last turn is longest ago.

        None: there is none, or one of the `undecided`, which may have a batch in a moment, would go before all of
        them.
        """
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
        """It had these, of whatever use they were."""
        self._had[run] += seconds

    def leave(self, run: str) -> None:
        """It is not trained any more."""
        del self._had[run], self._served[run]
        self._contending.discard(run)
