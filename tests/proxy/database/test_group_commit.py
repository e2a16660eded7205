from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import Connection, text

from proxy.database.group_commit import AT_ONCE, CAREFUL, Together
from proxy.database.unit_of_work import Database
from proxy.errors import StoreUnavailable


class Adding(Together[int]):
    """Adds a number; a group of them uses one statement."""

    def __init__(self, number: int, runs: list[Any]) -> None:
        self.number = number
        self._runs = runs

    def __call__(self, connection: Connection) -> int:
        self._runs.append(self.number)
        connection.execute(text("INSERT INTO numbers VALUES (:number)"), {"number": self.number})
        return self.number * 10

    @classmethod
    def together(cls, connection: Connection, writes: Sequence[Self]) -> list[int]:
        writes[0]._runs.append([write.number for write in writes])
        values = ", ".join(f"({write.number})" for write in writes)
        connection.execute(text(f"INSERT INTO numbers VALUES {values}"))
        return [write.number * 10 for write in writes]


class Numbers:
    """A table of distinct numbers. `runs` records every run of a write, `threads` the names of its threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = Database(f"sqlite:///{path}", busy_timeout_seconds=0.1)
        self.runs: list[Any] = []
        self.threads: set[str] = set()

    async def add(self, number: int) -> int:
        """Add a number. Raise ValueError for a negative one, after writing it."""

        def write(connection: Connection) -> int:
            self.runs.append(number)
            self.threads.add(threading.current_thread().name)
            connection.execute(text("INSERT INTO numbers VALUES (:number)"), {"number": number})
            if number < 0:
                raise ValueError(str(number))
            return number * 10

        return await self.database.commit(write)

    async def stored(self) -> set[int]:
        return await self.database.read(_stored)


def _stored(connection: Connection) -> set[int]:
    return set(connection.execute(text("SELECT number FROM numbers")).scalars())


@pytest.fixture
async def numbers(tmp_path: Path) -> AsyncIterator[Numbers]:
    numbers = Numbers(tmp_path / "numbers.sqlite3")
    await numbers.database.commit(
        lambda connection: connection.execute(text("CREATE TABLE numbers (number INTEGER PRIMARY KEY)"))
    )
    yield numbers
    await numbers.database.aclose()


async def test_every_caller_gets_its_own_result(numbers: Numbers) -> None:
    results = await asyncio.gather(*(numbers.add(number) for number in range(200)))
    assert results == [number * 10 for number in range(200)]
    assert await numbers.stored() == set(range(200))
    assert numbers.runs == list(range(200))
    assert len(numbers.threads) == 1


async def test_writes_that_arrive_together_share_transactions(numbers: Numbers) -> None:
    def transaction_count(connection: Connection) -> int:
        """Return SQLite's count of commits that changed the file."""
        return int(connection.exec_driver_sql("PRAGMA data_version").scalar_one())

    before = await numbers.database.read(transaction_count)
    await asyncio.gather(*(numbers.add(number) for number in range(2 * AT_ONCE)))
    # A version for a reader is at least one commit; with one of four readers it may have seen fewer, never more.
    assert await numbers.database.read(transaction_count) - before <= 3


async def test_a_failing_write_fails_alone(numbers: Numbers) -> None:
    adding = [numbers.add(number) for number in (1, -1, 2, 2, 3)]
    results = await asyncio.gather(*adding, return_exceptions=True)
    assert [results[0], results[2], results[4]] == [10, 20, 30]
    assert isinstance(results[1], ValueError)
    assert "UNIQUE" in str(results[3])
    assert await numbers.stored() == {1, 2, 3}
    assert numbers.runs == [1, -1, *(1, -1, 2, 2, 3)], "together first, then each alone"


async def test_writes_of_a_together_kind_run_as_one(numbers: Numbers) -> None:
    writes = [numbers.add(1), *(numbers.database.commit(Adding(n, numbers.runs)) for n in (2, 3)), numbers.add(4)]
    writes.append(numbers.database.commit(Adding(5, numbers.runs)))
    assert await asyncio.gather(*writes) == [10, 20, 30, 40, 50]
    assert numbers.runs == [[2, 3, 5], 1, 4]
    assert await numbers.stored() == {1, 2, 3, 4, 5}


async def test_writes_that_fail_as_one_run_one_by_one(numbers: Numbers) -> None:
    writes = [numbers.database.commit(Adding(n, numbers.runs)) for n in (2, 3, 3, 4)]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [results[0], results[1], results[3]] == [20, 30, 40]
    assert "UNIQUE" in str(results[2])
    assert numbers.runs == [[2, 3, 3, 4], 2, 3, 3, 4]
    assert await numbers.stored() == {2, 3, 4}


async def test_after_a_failure_transactions_use_savepoints_for_a_while(numbers: Numbers) -> None:
    await asyncio.gather(numbers.add(-1), numbers.add(1), return_exceptions=True)
    numbers.runs.clear()
    await asyncio.gather(numbers.add(2), numbers.add(-1), numbers.add(3), return_exceptions=True)
    assert numbers.runs == [2, -1, 3]
    for number in range(CAREFUL):
        await numbers.add(100 + number)
    numbers.runs.clear()
    await asyncio.gather(numbers.add(-1), numbers.add(4), return_exceptions=True)
    assert numbers.runs == [-1, *(-1, 4)], "they are again"
    assert await numbers.stored() == {1, 2, 3, 4, *range(100, 100 + CAREFUL)}


async def test_closing_waits_for_the_second_try_of_a_group(numbers: Numbers) -> None:
    adding = [asyncio.ensure_future(numbers.add(number)) for number in (1, -1, 2)]
    for _ in range(3):  # until their transaction is under way
        await asyncio.sleep(0)
    await numbers.database.aclose()
    await asyncio.sleep(0)  # their tasks see the results
    results = [write.result() if write.exception() is None else write.exception() for write in adding]
    assert [str(result) for result in results] == ["10", "-1", "20"]


async def test_a_write_that_fails_on_its_own_changes_nothing(numbers: Numbers) -> None:
    with pytest.raises(ValueError, match="-1"):
        await numbers.add(-1)
    assert await numbers.stored() == set()
    assert await numbers.add(1) == 10


async def test_a_result_is_durable_when_it_is_seen(numbers: Numbers) -> None:
    async def add_and_look(number: int) -> bool:
        await numbers.add(number)
        with sqlite3.connect(numbers.path) as other:
            return (number,) in other.execute("SELECT number FROM numbers").fetchall()

    assert all(await asyncio.gather(*(add_and_look(number) for number in range(20))))


async def test_a_cancelled_caller_does_not_undo_its_write(numbers: Numbers) -> None:
    tasks = [asyncio.create_task(numbers.add(number)) for number in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert await tasks[0] == 0
    assert await tasks[2] == 20
    assert await numbers.stored() == {0, 1, 2}


async def test_closing_waits_for_writes_in_progress(numbers: Numbers) -> None:
    tasks = [asyncio.create_task(numbers.add(number)) for number in range(3)]
    await asyncio.sleep(0)
    await numbers.database.aclose()
    assert await asyncio.gather(*tasks) == [0, 10, 20]


async def test_a_write_that_takes_long_delays_the_others_and_fails_none(numbers: Numbers) -> None:
    """Writes queue in the process; SQLite's own patience, a tenth of a second here, does not matter."""
    inside = threading.Event()

    def slow(connection: Connection) -> None:
        inside.set()
        connection.execute(text("INSERT INTO numbers VALUES (100)"))
        time.sleep(0.3)

    first = asyncio.create_task(numbers.database.commit(slow))
    await asyncio.to_thread(inside.wait, 10)
    await asyncio.gather(first, *(numbers.add(number) for number in range(10)), numbers.add(101))
    assert await numbers.stored() == {*range(10), 100, 101}


async def test_a_database_locked_by_another_process_is_unavailable(numbers: Numbers) -> None:
    other = sqlite3.connect(numbers.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    results = await asyncio.gather(*(numbers.add(number) for number in range(3)), return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) for result in results)
    other.execute("ROLLBACK")
    other.close()
    assert await numbers.add(1) == 10


async def test_a_full_disk_fails_what_does_not_fit_and_nothing_afterwards(numbers: Numbers) -> None:
    async def fill(size: int) -> None:
        await numbers.database.commit(
            lambda connection: connection.execute(
                text("INSERT INTO fillings VALUES (zeroblob(:size))"), {"size": size}
            )
        )

    def bound(connection: Connection) -> None:
        connection.exec_driver_sql("CREATE TABLE fillings (content BLOB)")
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 8}")

    await numbers.database.commit(bound)
    results = await asyncio.gather(fill(10), fill(1 << 20), numbers.add(5), return_exceptions=True)
    assert isinstance(results[1], StoreUnavailable)
    assert await numbers.add(1) == 10
    kept = {number for number, result in ((5, results[2]),) if result == 50}
    assert await numbers.stored() == kept | {1}, "what was told is what is there"


async def test_writes_that_share_a_transaction_with_one_too_large_for_the_disk_report_their_own_fate(
    numbers: Numbers,
) -> None:
    """SQLite may roll back the whole transaction: the other writes then fail too, and nothing of them is stored."""

    def bound(connection: Connection) -> None:
        connection.exec_driver_sql("CREATE TABLE fillings (content BLOB)")
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 2}")

    def fill(connection: Connection) -> None:
        connection.execute(text("INSERT INTO fillings VALUES (zeroblob(1 << 20))"))

    await numbers.database.commit(bound)
    mates = [numbers.add(number) for number in range(1, 11)]
    filling = numbers.database.commit(fill)
    results = list(await asyncio.gather(*mates[:5], filling, *mates[5:], return_exceptions=True))
    assert isinstance(results.pop(5), StoreUnavailable)
    told = {number for number, result in enumerate(results, start=1) if result == number * 10}
    assert await numbers.stored() == told
    assert all(
        result == number * 10 or isinstance(result, StoreUnavailable) for number, result in enumerate(results, 1)
    )
