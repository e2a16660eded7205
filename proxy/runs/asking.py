"""What trainers asked for lately: which runs have one that waits, and how large its batches are to be."""

from __future__ import annotations

import msgspec


class AskedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """`want` trajectories were asked for at the time `at`."""

    want: int
    at: float


class AskedBatches:
    """The last request of each run, in the memory of this proxy: a trainer that waits has no claim in the store yet.
    Another proxy on the same store learns of it with the first claim."""

    def __init__(self) -> None:
        self._last: dict[str, AskedBatch] = {}

    def note(self, run_id: str, want: int, at: float) -> None:
        self._last[run_id] = AskedBatch(want=want, at=at)

    def find(self, run_id: str) -> AskedBatch | None:
        return self._last.get(run_id)
