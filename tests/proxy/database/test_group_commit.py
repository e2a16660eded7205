from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from proxy.database.group_commit import GroupCommit
from proxy.database.unit_of_work import Database


class Numbers:
    """A table of numbers, each at most once, and how often a transaction was opened."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.group: GroupCommit[int] = GroupCommit(database)
        self.runs = 0

    async def add(self, number: int) -> int:
        async def write(connection: AsyncConnection) -> int:
            self.runs += 1
            await connection.execute(text("INSERT INTO numbers VALUES (:number)"), {"number": number})
            if number < 0:
                raise ValueError(str(number))
            return number * 10

        return await self.group.commit(write)

    async def stored(self) -> set[int]:
        async with self.database.read() as connection:
            return set((await connection.execute(text("SELECT number FROM numbers"))).scalars())


@pytest.fixture
async def numbers(tmp_path: Path) -> AsyncIterator[Numbers]:
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'numbers.sqlite3'}")
    async with database.write() as connection:
        await connection.execute(text("CREATE TABLE numbers (number INTEGER PRIMARY KEY)"))
    yield Numbers(database)
    await database.aclose()


async def test_every_caller_gets_its_own_result(numbers: Numbers) -> None:
    results = await asyncio.gather(*(numbers.add(number) for number in range(200)))
    assert results == [number * 10 for number in range(200)]
    assert await numbers.stored() == set(range(200))
    assert numbers.runs == 200


async def test_a_failing_write_fails_alone(numbers: Numbers) -> None:
    results = await asyncio.gather(*(numbers.add(number) for number in (1, -1, 2)), return_exceptions=True)
    assert (results[0], results[2]) == (10, 20)
    assert isinstance(results[1], ValueError)
    assert await numbers.stored() == {1, 2}


async def test_a_result_is_durable_when_it_is_seen(numbers: Numbers) -> None:
    async def add_and_look(number: int) -> bool:
        await numbers.add(number)
        return number in await numbers.stored()

    assert all(await asyncio.gather(*(add_and_look(number) for number in range(20))))


async def test_a_cancelled_caller_does_not_undo_its_write(numbers: Numbers) -> None:
    tasks = [asyncio.create_task(numbers.add(number)) for number in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert await tasks[0] == 0
    assert await tasks[2] == 20
    await numbers.group.aclose()
    assert await numbers.stored() == {0, 1, 2}


async def test_it_goes_on_after_a_pause(numbers: Numbers) -> None:
    assert await numbers.add(1) == 10
    await numbers.group.aclose()
    assert await numbers.add(2) == 20
