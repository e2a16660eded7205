"""Retention on a real store: content of finished sessions is removed in time, that of trainable ones stays."""

from __future__ import annotations

import pytest
from sqlalchemy import insert, update

from proxy.auth.service import Credentials
from proxy.contract.identifiers import SessionId
from proxy.database.tables import SessionRow
from proxy.retention.erasing import EraseService
from proxy.retention.retention import RetentionService
from tests.proxy.turns.world import World, open_world

DAY = 86400.0


def keeper(world: World) -> RetentionService:
    credentials = Credentials(world.database, b"s" * 32, world.clock)
    erasing = EraseService(world.database, world.runs, credentials, world.signals, world.clock)
    return RetentionService(world.database, world.runs, erasing, world.clock)


async def in_state(world: World, training: str, *, ended_days_ago: float | None) -> SessionId:
    session_id = await world.ready()
    ended_at = None if ended_days_ago is None else world.clock() - ended_days_ago * DAY
    values = {"training": training, "ended_at": ended_at, "state": "open" if ended_at is None else "ended"}
    await world.database.commit(
        lambda connection: connection.execute(update(SessionRow).where(SessionRow.id == session_id).values(**values))
    )
    return session_id


async def erased(world: World) -> set[str]:
    return {row.id for row in await world.rows(SessionRow) if row.erased_at is not None}


@pytest.mark.rows_by_hand
async def test_off_by_default(database_url: str) -> None:
    async with open_world(database_url) as world:
        await in_state(world, "consumed", ended_days_ago=10_000)
        assert await keeper(world).sweep() == 0
        assert await erased(world) == set()


@pytest.mark.rows_by_hand
async def test_content_of_finished_sessions_is_removed_after_its_time(database_url: str) -> None:
    async with open_world(database_url, retention={"max_age_days": 30}) as world:
        old = {state: await in_state(world, state, ended_days_ago=31) for state in STATES}
        for state in STATES:
            await in_state(world, state, ended_days_ago=29)
        await in_state(world, "pending", ended_days_ago=None)
        assert await keeper(world).sweep() == 4
        assert await erased(world) == {old[state] for state in ("consumed", "stale", "expired", "excluded")}
        rows = [row for row in await world.rows(SessionRow) if row.erased_at is not None]
        assert all(row.emptied_at is not None and row.erased_reason == "retention" for row in rows)
        assert await keeper(world).sweep() == 0
        assert await world.events("sessions.erased") == [{"count": 4, "reason": "retention", "by": "retention"}]


@pytest.mark.rows_by_hand
async def test_trainable_content_is_removed_only_on_request_and_never_while_in_use(database_url: str) -> None:
    async with open_world(database_url, retention={"max_age_days": 30, "unconsumed": True}) as world:
        old = {state: await in_state(world, state, ended_days_ago=31) for state in STATES}
        opened = await in_state(world, "pending", ended_days_ago=None)
        await keeper(world).sweep()
        assert await erased(world) == {old[state] for state in STATES if state != "leased"}
        assert opened not in await erased(world)


@pytest.mark.rows_by_hand
async def test_beyond_a_number_those_that_ended_first_go(database_url: str) -> None:
    async with open_world(database_url, retention={"max_sessions": 3}) as world:
        sessions = [await in_state(world, "consumed", ended_days_ago=days) for days in (5, 4, 3, 2, 1)]
        assert await keeper(world).sweep() == 2
        assert await erased(world) == set(sessions[:2])


async def test_many_are_erased_over_several_sweeps(database_url: str) -> None:
    async with open_world(database_url, retention={"max_age_days": 1}) as world:
        await world.database.commit(
            lambda connection: connection.execute(
                insert(SessionRow), [_row(world, number) for number in range(1_100)]
            )
        )
        assert [await keeper(world).sweep() for _ in range(3)] == [1000, 100, 0]


def _row(world: World, number: int) -> dict[str, object]:
    return {
        "id": f"ses_{number:026}",
        "run_id": world.run_id,
        "purpose": "train",
        "attributed_by": "new",
        "state": "ended",
        "training": "expired",
        "turn_count": 0,
        "created_at": 0.0,
        "last_active_at": 0.0,
        "ended_at": float(number),
    }


STATES = ("pending", "ready", "leased", "consumed", "stale", "expired", "excluded")
