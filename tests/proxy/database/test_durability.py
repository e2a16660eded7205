"""Durability of SQLite's commits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from proxy.database.unit_of_work import Database
from tests.database import sqlite_database

FULL, NORMAL = 2, 1

ASK = (
    "import asyncio, sys\n"
    "from proxy.database.unit_of_work import Database\n"
    "async def ask():\n"
    "    database = Database(sys.argv[1])\n"
    "    print(await database.commit(lambda found: found.exec_driver_sql('PRAGMA synchronous').scalar_one()))\n"
    "    await database.aclose()\n"
    "asyncio.run(ask())\n"
)


def test_every_commit_waits_for_the_disk_by_default(tmp_path: Path) -> None:
    """In a new process, as this one's stores do not wait for the disk."""
    url = sqlite_database(tmp_path)
    asked = subprocess.run([sys.executable, "-c", ASK, url], capture_output=True, text=True, check=True)
    assert int(asked.stdout) == FULL


@pytest.mark.parametrize(("asked", "level"), [("normal", NORMAL), ("full", FULL)])
async def test_every_connection_has_the_configured_durability(tmp_path: Path, asked: str, level: int) -> None:
    database = Database(sqlite_database(tmp_path), synchronous=asked)
    statement = "PRAGMA synchronous"
    assert await database.commit(lambda found: found.exec_driver_sql(statement).scalar_one()) == level
    assert await database.read(lambda found: found.exec_driver_sql(statement).scalar_one()) == level
    await database.aclose()
