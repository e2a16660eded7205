from __future__ import annotations

import asyncio

import pytest

from proxy.errors import StoreUnavailable
from proxy.overview import live
from proxy.overview.live import Remembered


class Counted:
    """A figure that counts how often it was computed, and waits to be let go."""

    def __init__(self) -> None:
        self.computed = 0
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.fails = False

    async def compute(self) -> int:
        self.computed += 1
        await self.let_go.wait()
        if self.fails:
            raise StoreUnavailable("away")
        return self.computed


async def test_what_is_quick_is_made_anew_for_who_asks() -> None:
    remembered, counted = Remembered(hold_seconds=0.0), Counted()
    assert await remembered.get("figure", counted.compute) == 1
    answers = await asyncio.gather(*(remembered.get("figure", counted.compute) for _ in range(5)))
    assert sorted(answers) == answers
    assert counted.computed >= 1


async def test_what_is_slow_is_made_behind_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_PATIENCE_S", -1.0)
    monkeypatch.setattr(live, "_COST_FACTOR", 0.0)
    remembered, counted = Remembered(hold_seconds=0.0), Counted()
    assert await remembered.get("figure", counted.compute) == 1
    counted.let_go.clear()
    for _ in range(3):
        assert await remembered.get("figure", counted.compute) == 1, "the old one, at once"
        await asyncio.sleep(0)
    assert counted.computed == 2, "one at a time"
    counted.let_go.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await remembered.get("figure", counted.compute) == 2


async def test_where_that_fails_the_next_who_asks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_PATIENCE_S", -1.0)
    monkeypatch.setattr(live, "_COST_FACTOR", 0.0)
    remembered, counted = Remembered(hold_seconds=0.0), Counted()
    await remembered.get("figure", counted.compute)
    counted.fails = True
    assert await remembered.get("figure", counted.compute) == 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable):
        await remembered.get("figure", counted.compute)
    remembered.close()
