"""The last batch that each run's trainer asked for: it shows that a trainer waits, and for how many trajectories."""

from __future__ import annotations

import msgspec


class AskedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer's request for `want` trajectories at time `at`, in seconds since the epoch."""

    want: int
    at: float


class AskedBatches:
    """The last request of each run, in this process's memory."""

    # Memory suffices: the value only explains on the page what a waiting trainer waits for. Another proxy on the same
    # store knows nothing of it until the trainer's first claim.
    def __init__(self) -> None:
        self._last: dict[str, AskedBatch] = {}

    def note(self, run_id: str, want: int, at: float) -> None:
        self._last[run_id] = AskedBatch(want=want, at=at)

    def find(self, run_id: str) -> AskedBatch | None:
        return self._last.get(run_id)
