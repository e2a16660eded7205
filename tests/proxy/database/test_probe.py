"""The write probe: asked often, it makes at most one small write a second."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from proxy.database.probe import FRESH_SECONDS, WriteProbe
from proxy.database.unit_of_work import Database
from proxy.errors import StoreUnavailable
from tests.database import files_end_at, needs_postgresql, postgresql_database, sqlite_database
from tests.proxy.store import MovedClock


class Writes:
    """A store that counts writes, fails while it has a `failure`, and hangs while `open` is not set."""

    def __init__(self) -> None:
        self.count = 0
        self.failure: StoreUnavailable | None = None
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self) -> None:
        self.count += 1
        await self.open.wait()
        if self.failure is not None:
            raise self.failure


async def test_many_readiness_checks_make_one_write() -> None:
    writes, clock = Writes(), MovedClock()
    probe = WriteProbe(writes, now=clock)
    await asyncio.gather(*(probe.check() for _ in range(50)))
    assert writes.count == 1
    clock.now += FRESH_SECONDS
    await probe.check()
    assert writes.count == 2


async def test_a_failure_is_reported_until_a_write_succeeds() -> None:
    writes, clock = Writes(), MovedClock()
    probe = WriteProbe(writes, now=clock)
    writes.failure = StoreUnavailable("the disk is full")
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="the disk is full"):
            await probe.check()
    assert writes.count == 1
    writes.failure = None
    clock.now += FRESH_SECONDS
    await probe.check()


async def test_checks_do_not_queue_behind_a_write_that_hangs() -> None:
    writes = Writes()
    probe = WriteProbe(writes, patience_seconds=0.05)
    writes.open.clear()
    for _ in range(20):
        with pytest.raises(StoreUnavailable, match="has been waiting"):
            await probe.check()
    assert writes.count == 1
    writes.open.set()
    await probe.check()
    await probe.aclose()


async def test_a_locked_store_is_not_ready(tmp_path: Path) -> None:
    url = sqlite_database(tmp_path)
    database = Database(url, busy_timeout_seconds=60)
    await database.check_writable()
    with closing(sqlite3.connect(tmp_path / "store.sqlite3", isolation_level=None)) as other:
        await asyncio.sleep(FRESH_SECONDS)
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        for _ in range(5):
            with pytest.raises(StoreUnavailable, match="lock"):
                await database.check_writable()
        assert time.monotonic() - began < 10, "the first waits two seconds, and the others not at all"
    await database.aclose()


async def test_a_store_on_a_full_disk_is_not_ready(tmp_path: Path) -> None:
    database = Database(sqlite_database(tmp_path))
    with files_end_at(1), pytest.raises(StoreUnavailable) as raised:
        await database.check_writable()
    assert "disk" in raised.value.message or "full" in raised.value.message
    await asyncio.sleep(FRESH_SECONDS)
    await database.check_writable()
    await database.aclose()


@needs_postgresql
async def test_a_read_only_postgresql_is_not_ready() -> None:
    with postgresql_database() as url:
        database = Database(f"{url}&options=-c%20default_transaction_read_only%3Don")
        assert await database.read(lambda connection: connection.exec_driver_sql("SELECT 1").scalar_one()) == 1
        with pytest.raises(StoreUnavailable, match="read-only"):
            await database.check_writable()
        await database.aclose()
