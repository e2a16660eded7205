"""Statements of claims and turns use indexes, so their cost does not grow with the store."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.sessions.repository import SessionRepository
from tests.database import sqlite_database
from tests.proxy.turns.world import World

GROWING = ("sessions", "turns", "rewards", "claims", "claimed_sessions", "groups")


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """A SQLite file: PostgreSQL's plans depend on how full its tables are."""
    return sqlite_database(tmp_path)


async def watched(world: World) -> list[tuple[str, Any]]:
    """Return a list that every statement from now on is appended to."""
    statements: list[tuple[str, Any]] = []

    def trace(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        driver.set_trace_callback(lambda statement: statements.append((statement, ())))

    await world.database.commit(trace)
    await world.database.read(trace)
    return statements


def scans(world: World, statements: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Return plan steps that scan a growing table, with their statements."""
    found = []
    connection = sqlite3.connect(str(world.database.url.database))
    try:
        for statement, parameters in statements:
            if statement.startswith(("BEGIN", "COMMIT", "ROLLBACK")):
                continue
            for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters):
                if step.startswith("SCAN ") and step.split()[1] in GROWING:
                    found.append((step, statement))
    finally:
        connection.close()
    return found


async def test_a_claim_scans_nothing(world: World) -> None:
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    group = await world.group(size=2)
    for member in range(2):
        await world.ready(group=group)
        await world.ready(version=member)
    await world.set_run(head_version=1)
    statements = await watched(world)
    batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=4, at_least=1, max_staleness=0))
    assert batch.trajectory_count == 1
    world.clock.now += world.run.settings.lease_seconds
    assert await claims.expire() == 1
    assert any("UPDATE sessions" in statement for statement, _ in statements)
    assert scans(world, statements) == []


async def test_a_turn_scans_nothing(world: World) -> None:
    session = await world.session()
    root = await world.turn(session, conversation="a")
    statements = await watched(world)
    await world.turn(session, parent=root, prefix_tokens=5, idempotency_key="k")
    await world.store.find_parent(session, [b"x" * 16, b"y" * 16])
    await world.store.recent_turns(session, 4)
    await world.store.answered(session, "k")
    assert any("INSERT INTO turns" in statement for statement, _ in statements)
    assert scans(world, statements) == []


async def test_sessions_that_may_have_ended_are_read_by_their_ids(world: World) -> None:
    known = await world.session()
    statements = await watched(world)
    rows = await world.database.read(
        lambda connection: SessionRepository(connection).contexts(run_id=world.run.id, session_ids=[known, "ses_x"])
    )
    assert [row.id for row in rows] == [known]
    assert any("FROM sessions" in statement for statement, _ in statements)
    assert scans(world, statements) == []
