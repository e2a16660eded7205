"""One time for all proxies on a store, by PostgreSQL's clock."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from proxy.database.store_clock import StoreClock
from proxy.database.unit_of_work import Database
from tests.database import needs_postgresql, postgresql_database, sqlite_database

WRONG = 86_400.0
"""What this machine's clock shows."""


class Times:
    """The server's clock and the monotonic clock of this machine, which a test sets; `delay` is how long an answer of
    the server takes after it read its clock."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.steady, self.delay = 1_000_000.0, 50.0, 0.0
        self.clock = StoreClock(database, machine=lambda: WRONG, steady=lambda: self.steady)
        monkeypatch.setattr("proxy.database.store_clock.database_now", self._answer)

    def _answer(self, *_: object) -> float:
        read = self.server
        self.pass_(self.delay)
        return read

    def pass_(self, seconds: float) -> None:
        self.server += seconds
        self.steady += seconds


@pytest.fixture
def url() -> Iterator[str]:
    with postgresql_database() as found:
        yield found


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    opened = Database(url)
    yield opened
    await opened.aclose()


async def test_on_sqlite_it_is_the_machines_clock(tmp_path: Path) -> None:
    database = Database(sqlite_database(tmp_path))
    clock = await StoreClock.open(database, lambda: WRONG)
    assert clock() == WRONG
    await database.aclose()


@needs_postgresql
async def test_it_is_the_servers_whatever_the_machine_shows(database: Database) -> None:
    clock = await StoreClock.open(database, lambda: WRONG)
    assert clock() == pytest.approx(time.time(), abs=5)


@needs_postgresql
async def test_slow_answers_change_nothing_that_they_do_not_contradict(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Times(database, monkeypatch)
    await times.clock.follow()
    times.delay = 8.0
    for _ in range(3):
        times.pass_(60.0)
        await times.clock.follow()
        assert times.clock() == times.server
    # This machine's monotonic clock runs too slowly.
    times.delay = 0.0
    times.server += 2.0
    await times.clock.follow()
    assert times.clock() == times.server


@needs_postgresql
async def test_a_servers_clock_that_is_set_back_stops_it_and_a_large_step_is_followed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Times(database, monkeypatch)
    await times.clock.follow()
    begun = times.clock()
    times.server -= 30.0
    await times.clock.follow()
    assert times.clock() == begun
    times.pass_(20.0)
    assert times.clock() == begun
    times.pass_(20.0)
    assert times.clock() == begun + 10.0
    times.server -= 3600.0
    await times.clock.follow()
    assert times.clock() == times.server
    times.server += 7200.0
    await times.clock.follow()
    assert times.clock() == times.server
