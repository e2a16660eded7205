"""What makes live pages cheap: answers kept in proportion to their cost, and a rate of which only the end is read."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar, cast

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import created_at, least_turn_id
from proxy.database.unit_of_work import Database
from proxy.overview.repository import OverviewRepository
from proxy.overview.views import RatePoint

_Answer = TypeVar("_Answer")

LOOK_AHEAD_SECONDS = 30.0
"""How often the proxy itself asks for what takes long, so that nobody else has to wait for it."""

_COST_FACTOR = 20.0
"""An answer that took t seconds is kept for 20 t: watching costs a twentieth of one core at most."""

_MOST_AGE_S = 60.0
"""An answer that is older by this than it is kept for its cost is not given any more."""


class _Answered(msgspec.Struct, frozen=True):
    """`at` is when it was begun to be made: what changed since is not in it. `seconds` is what it costs to make."""

    value: Any
    at: float
    seconds: float

    def is_due(self, now: float, hold_seconds: float) -> bool:
        """Whether it is to be made again."""
        return now - self.at >= max(hold_seconds, (1 + _COST_FACTOR) * self.seconds)

    def is_too_old(self, now: float) -> bool:
        return now - self.at > _MOST_AGE_S + _COST_FACTOR * self.seconds


def _never(_answer: Any) -> bool:
    return False


class Remembered:
    """Answers by key, each for `hold_seconds` at least; many who ask at once cause one computation. `elapsed` is a
    clock that is never set back."""

    def __init__(self, hold_seconds: float, elapsed: Clock = time.monotonic) -> None:
        self._hold_seconds = hold_seconds
        self._elapsed = elapsed
        self._answers: dict[Hashable, _Answered] = {}
        self._locks: dict[Hashable, asyncio.Lock] = {}
        self._under_way: dict[Hashable, asyncio.Task[None]] = {}

    async def get(
        self,
        key: Hashable,
        compute: Callable[[], Awaitable[_Answer]],
        *,
        may_be_old: Callable[[_Answer], bool] = _never,
        anew: bool = False,
    ) -> _Answer:
        """`anew`: not one that was made before. An answer that `may_be_old` is given all the same, and is made again
        behind who asks, until it is a minute old: then, as the first time, it is waited for."""
        asked, known = self._elapsed(), self._answers.get(key)
        if known is not None and may_be_old(known.value) and not known.is_too_old(asked):
            if known.is_due(asked, self._hold_seconds) and key not in self._under_way:
                self._under_way[key] = asyncio.create_task(self._renewed(key, compute))
            return cast("_Answer", known.value)
        async with self._locks.setdefault(key, asyncio.Lock()):
            now, known = self._elapsed(), self._answers.get(key)
            if known is not None and (
                known.at > asked
                or (not anew and not known.is_due(now, self._hold_seconds))
                or (may_be_old(known.value) and not known.is_too_old(now))
            ):
                return cast("_Answer", known.value)
            return await self._made(key, compute)

    def close(self) -> None:
        """Ends what is being made for nobody in particular."""
        for task in self._under_way.values():
            task.cancel()

    async def _made(self, key: Hashable, compute: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """What the first one took says nothing: connections are opened for it, and statements compiled."""
        began = self._elapsed()
        answer = await compute()
        seconds = self._elapsed() - began if key in self._answers else 0.0
        self._answers[key] = _Answered(answer, began, seconds)
        return answer

    async def _renewed(self, key: Hashable, compute: Callable[[], Awaitable[Any]]) -> None:
        """Where it fails, the old answer is not given any more: the next who asks gets the reason."""
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                await self._made(key, compute)
        except Exception:  # noqa: BLE001  (see above)
            self._answers.pop(key, None)
        finally:
            del self._under_way[key]


class RateHistory:
    """Output tokens of one run over the last minutes. Only the newest end is read again.

    However many turns come, a look goes through `TURNS` of them. Where these do not reach back far enough, what came
    before them is not known, unless it was read by an earlier look; nor is their first quarter, in which turns may
    have ended that began before them.
    """

    WIDTH_S = 5.0
    BUCKETS = 120
    TURNS = 10_000
    _LONGEST_TURN_S = 3600.0
    """A turn that took longer is not in the rates."""
    _SETTLED_S = 15.0
    """A turn is stored this long after its end at most; older buckets do not change."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._tokens: dict[int, int] = {}
        self._known_since = 0.0
        """Everything from then until the last look is in `_tokens`."""
        self._read_at: float | None = None

    async def update(self, database: Database, now: float) -> None:
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
        if read_at is None or renewed * self.WIDTH_S > read_at:  # what came between is not known
            self._tokens, self._known_since, renewed = {}, since, oldest
        kept = {number: tokens for number, tokens in self._tokens.items() if oldest <= number < renewed}
        self._tokens = {**kept, **{number: tokens for number, tokens in fresh.items() if number >= renewed}}
        self._read_at = now

    def points(self, now: float) -> tuple[RatePoint, ...]:
        """Whole buckets, from the first with tokens on; the running one is left out."""
        whole = [number for number in self._tokens if number * self.WIDTH_S >= self._known_since]
        if not whole:
            return ()
        last = int(now // self.WIDTH_S)
        return tuple(
            RatePoint(at=(number + 1) * self.WIDTH_S, tokens_per_second=self._tokens.get(number, 0) / self.WIDTH_S)
            for number in range(min(whole), last)
        )

    def last_minute(self, now: float) -> float:
        """Tokens per second over the last minute, or since the first known token in it."""
        recent = {
            number: tokens for number, tokens in self._tokens.items() if (number + 1) * self.WIDTH_S > now - 60.0
        }
        if not recent:
            return 0.0
        began = max(min(recent) * self.WIDTH_S, self._known_since)
        return sum(recent.values()) / max(self.WIDTH_S, now - began)
