"""The rate of output tokens of a run over the last minutes."""

from __future__ import annotations

import math

from sqlalchemy import Connection

from proxy.contract.identifiers import created_at, least_turn_id
from proxy.database.unit_of_work import Database
from proxy.overview.repository import OverviewRepository
from proxy.overview.views import RatePoint


class RateHistory:
    """Output tokens of one run in buckets of `WIDTH_S` seconds over the last `BUCKETS` buckets.

    An update reads only the buckets that may have changed, and visits at most `TURNS` turns, whatever the traffic. If
    these do not reach back to the previous update, earlier buckets are forgotten. Their first quarter of time is not
    used either, as turns that ended in it may have begun before them.
    """

    WIDTH_S = 5.0
    BUCKETS = 120
    TURNS = 10_000
    # Turns are found by the time of their start; one that took longer is not in the rates.
    _LONGEST_TURN_S = 3600.0
    # A turn is stored at most this long after its end, so older buckets do not change.
    _SETTLED_S = 15.0

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._tokens: dict[int, int] = {}
        # `_tokens` is complete from this time to the last update.
        self._known_since = 0.0
        self._read_at: float | None = None

    async def update(self, database: Database, now: float) -> None:
        """Read the buckets that may have changed since the last update."""
        oldest = int(now // self.WIDTH_S) - self.BUCKETS + 1
        since = oldest * self.WIDTH_S
        read_at = self._read_at if self._read_at is not None and self._read_at <= now else None
        if read_at is not None:
            since = max(since, (read_at - self._SETTLED_S) // self.WIDTH_S * self.WIDTH_S)

        def read(connection: Connection) -> tuple[float, dict[int, int]]:
            repository = OverviewRepository(connection)
            begun: str = least_turn_id(since - self._LONGEST_TURN_S)
            finished_since = since
            first = repository.newest_turn(self.TURNS)
            if first is not None and first > begun:
                begun, began = first, created_at(first)
                finished_since = max(since, began + (now - began) / 4)
            return finished_since, repository.output_rate(
                self._run_id, begun=begun, since=finished_since, origin=0.0, width=self.WIDTH_S
            )

        since, fresh = await database.read(read)
        renewed = math.ceil(since / self.WIDTH_S)
        if read_at is None or renewed * self.WIDTH_S > read_at:  # turns in between were not read
            self._tokens, self._known_since, renewed = {}, since, oldest
        kept = {number: tokens for number, tokens in self._tokens.items() if oldest <= number < renewed}
        self._tokens = {**kept, **{number: tokens for number, tokens in fresh.items() if number >= renewed}}
        self._read_at = now

    def points(self, now: float) -> tuple[RatePoint, ...]:
        """Return the rates of complete buckets, from the first with tokens on."""
        whole = [number for number in self._tokens if number * self.WIDTH_S >= self._known_since]
        if not whole:
            return ()
        last = int(now // self.WIDTH_S)
        return tuple(
            RatePoint(at=(number + 1) * self.WIDTH_S, tokens_per_second=self._tokens.get(number, 0) / self.WIDTH_S)
            for number in range(min(whole), last)
        )

    def last_minute(self, now: float) -> float:
        """Return tokens per second over the last minute, or since the first known token in it."""
        recent = {
            number: tokens for number, tokens in self._tokens.items() if (number + 1) * self.WIDTH_S > now - 60.0
        }
        if not recent:
            return 0.0
        began = max(min(recent) * self.WIDTH_S, self._known_since)
        return sum(recent.values()) / max(self.WIDTH_S, now - began)
