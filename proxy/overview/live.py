"""What makes live pages cheap: answers kept in proportion to their cost, and a rate of which only the end is read."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar, cast

import msgspec

from proxy.contract.identifiers import created_at, least_turn_id
from proxy.database.unit_of_work import Database
from proxy.overview.repository import OverviewRepository
from proxy.overview.views import RatePoint

_Answer = TypeVar("_Answer")

_COST_FACTOR = 20.0
"""An answer that took t seconds is kept for 20 t: watching costs a twentieth of one core at most."""

_PATIENCE_S = 0.03
"""Who asks for an answer that takes longer, and was given before, gets the old one while the new one is made."""


class _Answered(msgspec.Struct, frozen=True):
    """`due` and `seconds` of monotonic time: when it is to be made again, and how long it took."""

    value: Any
    due: float
    seconds: float


class Remembered:
    """Answers by key, each for `hold_seconds` at least; many who ask at once cause one computation. Only the first
    who asks for a slow one waits for it."""

    def __init__(self, hold_seconds: float) -> None:
        self._hold_seconds = hold_seconds
        self._answers: dict[Hashable, _Answered] = {}
        self._locks: dict[Hashable, asyncio.Lock] = {}
        self._under_way: dict[Hashable, asyncio.Task[None]] = {}

    async def get(self, key: Hashable, compute: Callable[[], Awaitable[_Answer]]) -> _Answer:
        known = self._answers.get(key)
        if known is not None and known.seconds > _PATIENCE_S:
            if time.monotonic() >= known.due and key not in self._under_way:
                self._under_way[key] = asyncio.create_task(self._renewed(key, compute))
            return cast("_Answer", known.value)
        async with self._locks.setdefault(key, asyncio.Lock()):
            known = self._answers.get(key)
            if known is not None and time.monotonic() < known.due:
                return cast("_Answer", known.value)
            return await self._made(key, compute)

    def close(self) -> None:
        """Ends what is being made for nobody in particular."""
        for task in self._under_way.values():
            task.cancel()

    async def _made(self, key: Hashable, compute: Callable[[], Awaitable[_Answer]]) -> _Answer:
        began = time.monotonic()
        answer = await compute()
        ended = time.monotonic()
        seconds = ended - began
        self._answers[key] = _Answered(answer, ended + max(self._hold_seconds, _COST_FACTOR * seconds), seconds)
        return answer

    async def _renewed(self, key: Hashable, compute: Callable[[], Awaitable[Any]]) -> None:
        """Where it fails, the old answer is not given any more: the next who asks gets the reason."""
        try:
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
        begun: str = least_turn_id(since - self._LONGEST_TURN_S)
        async with database.read() as connection:
            repository = OverviewRepository(connection)
            first = await repository.newest_turn(self.TURNS)
            if first is not None and first > begun:
                begun, began = first, created_at(first)
                since = max(since, began + (now - began) / 4)
            fresh = await repository.output_rate(
                self._run_id, begun=begun, since=since, origin=0.0, width=self.WIDTH_S
            )
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
