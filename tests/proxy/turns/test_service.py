from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from operator import attrgetter
from typing import Any

import msgspec
import pytest
from sqlalchemy import update

from proxy.contract.identifiers import SessionId
from proxy.contract.turn import TurnState
from proxy.database.tables import SessionRow, TurnRow
from proxy.errors import Conflict, Gone, NotFound
from proxy.turns.assembly import BrokenTree
from proxy.turns.path_cache import PathCache
from proxy.turns.recording_repository import RecordingRepository
from proxy.turns.service import TrajectoryStore, TurnRecord
from tests.proxy.turns.world import World, open_world


def hash_of(conversation: str) -> bytes:
    return conversation.encode().ljust(16, b"\0")


def cold(world: World) -> TrajectoryStore:
    """Return a store with an empty cache of size zero, as after a restart."""
    return TrajectoryStore(
        database=world.database, clock=world.clock, signals=world.signals, paths=PathCache(tokens=0)
    )


async def test_a_turn_counts_in_its_session(world: World) -> None:
    session = await world.session()
    world.clock.now += 5
    await world.turn(session, version=3)
    await world.turn(session, version=1)
    row = await world.session_row(session)
    assert (row.turn_count, row.oldest_version, row.newest_version) == (2, 1, 3)
    assert row.last_active_at == world.clock.now
    assert sorted(turn.ordinal for turn in await world.rows(TurnRow)) == [0, 1]


async def test_a_turn_without_output_does_not_change_the_versions(world: World) -> None:
    session = await world.session()
    await world.turn(session, output_ids=(), state=TurnState.FAILED)
    row = await world.session_row(session)
    assert (row.turn_count, row.oldest_version, row.newest_version) == (1, None, None)
    await world.turn(session, version=2)
    await world.turn(session, output_ids=())
    row = await world.session_row(session)
    assert (row.turn_count, row.oldest_version, row.newest_version) == (3, 2, 2)


async def test_the_same_turn_again_changes_nothing(world: World) -> None:
    session = await world.session()
    record = await world.turn(session)
    before = await world.session_row(session)
    world.clock.now += 5
    await world.store.record(record)
    await cold(world).record(record)
    assert await world.session_row(session) == before
    assert len(await world.rows(TurnRow)) == 1


async def test_turns_recorded_at_once_get_ordinals_of_their_own(world: World) -> None:
    session = await world.session()
    await asyncio.gather(*(world.turn(session) for _ in range(20)))
    assert sorted(turn.ordinal for turn in await world.rows(TurnRow)) == list(range(20))


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_turns_recorded_in_a_group_equal_turns_recorded_one_by_one(
    world: World, seed: int, refused: bool
) -> None:
    """Sessions are open, ended, rewarded or evaluations; a refused turn does not affect the others of its group."""
    alone = await drawn_turns(world, random.Random(seed), refused=refused)
    together = await drawn_turns(world, random.Random(seed), refused=refused)
    failures = [await failure(world.store.record(record)) for record in alone]
    assert failures == await asyncio.gather(*(failure(world.store.record(record)) for record in together))
    assert set(failures) == ({None, NotFound, Gone, Conflict} if refused else {None})
    one, other = await stored(world, alone), await stored(world, together)
    assert one == other
    assert {session["training"] for session, _turns in one} == {"pending", "ready", "excluded"}


async def test_postgresql_records_a_group_of_turns_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if not world.database.url.get_backend_name().startswith("postgresql"):
        pytest.skip("SQLite writes one row at a time")
    # The method that records a single turn: without it, only recording a group can succeed.
    monkeypatch.setattr(RecordingRepository, "_count_and_insert", None)
    records = await drawn_turns(world, random.Random(0), refused=False)
    await asyncio.gather(*(world.store.record(record) for record in records))
    assert {turn.id for turn in await world.rows(TurnRow)} == {record.turn.id for record in records}


async def drawn_turns(world: World, draw: random.Random, *, refused: bool) -> list[TurnRecord]:
    sessions = [await world.session(purpose="train" if number % 3 else "eval") for number in range(12)]
    records = [world.record(session, version=draw.randrange(5)) for session in sessions]
    world.clock.now += 1
    for session in sessions[:4]:
        await world.reward(session, draw.random())
    await world.end(sessions[4])
    for number in range(40):
        record = world.record(
            draw.choice(sessions[5:]),
            version=draw.randrange(5),
            output_ids=tuple(draw.choices(range(1000), k=draw.randrange(5))),
            conversation=f"conversation {number}",
        )
        turn = msgspec.structs.replace(record.turn, masked=((0, 1),) * draw.randrange(2))
        said = [{"role": "user", "content": "grüße\0" * draw.randrange(3)}]
        users = (b"u" * 16, b"v" * 16)[: draw.randrange(3)]
        records.append(msgspec.structs.replace(record, turn=turn, messages=said, users=users))
    if refused:
        erased = update(SessionRow).where(SessionRow.id == sessions[5]).values(erased_at=world.clock())
        await world.database.commit(lambda connection: connection.execute(erased))
        keyed = [world.record(sessions[6], idempotency_key="a") for _ in range(2)]
        records += [*keyed, records[7], world.record(SessionId("ses_unknown"))]
    return records


async def failure(recording: Awaitable[bool]) -> type[Exception] | None:
    try:
        await recording
    except (NotFound, Gone, Conflict) as error:
        return type(error)
    return None


async def stored(world: World, records: list[TurnRecord]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return the sessions of these records with their turns, without ids and times."""
    sessions = {session.id: session for session in await world.rows(SessionRow)}
    turns = sorted(await world.rows(TurnRow), key=attrgetter("ordinal"))
    return [
        (bare(sessions[session_id]), [bare(turn) for turn in turns if turn.session_id == session_id])
        for session_id in dict.fromkeys(record.turn.session_id for record in records)
        if session_id in sessions
    ]


def bare(row: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in row._mapping.items()
        if name.rpartition("_")[2] not in {"id", "at", "of", "response"}
    }


async def test_an_unknown_session_is_refused(world: World) -> None:
    with pytest.raises(NotFound):
        await world.turn(SessionId("ses_unknown"))
    assert await world.rows(TurnRow) == []


async def test_an_idempotency_key_is_for_one_turn(world: World) -> None:
    session = await world.session()
    first = await world.turn(session, idempotency_key="a")
    with pytest.raises(Conflict):
        await world.turn(session, idempotency_key="a")
    row = await world.session_row(session)
    assert row.turn_count == 1
    assert await world.store.answered(session, "a") == {"id": first.turn.id}
    assert await world.store.answered(session, "b") is None
    other = await world.session()
    await world.turn(other, idempotency_key="a")


async def test_a_turn_that_ends_after_its_reward_makes_the_session_ready(world: World) -> None:
    session = await world.session()
    running = world.record(session)
    world.clock.now += 1
    await world.reward(session, 1.0)
    assert (await world.session_row(session)).training != "ready"
    given = world.signals.trajectories.count
    await world.store.record(running)
    assert (await world.session_row(session)).training == "ready"
    assert world.signals.trajectories.count == given + 1


async def test_a_turn_of_an_ended_session_is_recorded(world: World) -> None:
    session = await world.ready()
    await world.turn(session)
    row = await world.session_row(session)
    assert (row.turn_count, row.training) == (2, "ready")


async def test_the_parent_is_the_longest_conversation(world: World) -> None:
    session = await world.session()
    first = await world.turn(session, conversation="a")
    second = await world.turn(
        session, parent=first, prefix_tokens=5, prompt_ids=(6,), output_ids=(7, 8), conversation="ab"
    )
    for store in (world.store, cold(world)):
        parent = await store.find_parent(session, [hash_of("abc"), hash_of("ab"), hash_of("a")])
        assert parent is not None
        assert parent.id == second.turn.id
        assert parent.path_ids == (1, 2, 3, 4, 5, 6, 7, 8)
        shorter = await store.find_parent(session, [hash_of("a")])
        assert shorter is not None
        assert shorter.path_ids == (1, 2, 3, 4, 5)
        assert await store.find_parent(session, [hash_of("x")]) is None
        assert await store.find_parent(session, []) is None
        assert await store.find_parent(await world.session(), [hash_of("a")]) is None


async def test_a_failed_turn_is_never_a_parent(world: World) -> None:
    session = await world.session()
    good = await world.turn(session, conversation="a")
    await world.turn(session, conversation="a", state=TurnState.FAILED, output_ids=())
    for store in (world.store, cold(world)):
        parent = await store.find_parent(session, [hash_of("a")])
        assert parent is not None
        assert parent.id == good.turn.id
        assert [turn.id for turn in await store.recent_turns(session, 10)] == [good.turn.id]


async def test_the_newest_turn_with_the_conversation_is_the_parent(world: World) -> None:
    session = await world.session()
    await world.turn(session, conversation="a")
    newest = await world.turn(session, conversation="a", output_ids=(9,))
    for store in (world.store, cold(world)):
        parent = await store.find_parent(session, [hash_of("a")])
        assert parent is not None
        assert parent.id == newest.turn.id


async def test_recent_turns_come_newest_first_with_their_paths(world: World) -> None:
    session = await world.session()
    root = await world.turn(session)
    left = await world.turn(session, parent=root, prefix_tokens=5, prompt_ids=(6,), output_ids=(7,))
    right = await world.turn(session, parent=root, prefix_tokens=2, prompt_ids=(8,), output_ids=(9,))
    for store in (world.store, cold(world)):
        turns = await store.recent_turns(session, 2)
        assert [turn.id for turn in turns] == [right.turn.id, left.turn.id]
        assert [turn.path_ids for turn in turns] == [(1, 2, 8, 9), (1, 2, 3, 4, 5, 6, 7)]


async def test_more_shared_tokens_than_the_parent_has_are_refused(world: World) -> None:
    session = await world.session()
    root = await world.turn(session)
    with pytest.raises(BrokenTree):
        await world.turn(session, parent=root, prefix_tokens=6)
    assert len(await world.rows(TurnRow)) == 1


async def test_a_small_cache_changes_no_answer(world: World) -> None:
    store = TrajectoryStore(
        database=world.database, clock=world.clock, signals=world.signals, paths=PathCache(tokens=12)
    )
    session = await world.session()
    parent = None
    expected: tuple[int, ...] = ()
    for step in range(8):
        prompt, output = (100 + step,), (200 + step,)
        parent = world.record(
            session,
            parent=parent,
            prefix_tokens=len(expected),
            prompt_ids=prompt,
            output_ids=output,
            conversation=f"turn {step}",
        )
        await store.record(parent)
        expected = (*expected, *prompt, *output)
        found = await store.find_parent(session, [hash_of(f"turn {step}")])
        assert found is not None
        assert found.path_ids == expected


async def test_turns_are_found_after_a_restart(database_url: str) -> None:
    async with open_world(database_url) as world:
        session = await world.session()
        await world.turn(session, conversation="a")
    async with open_world(database_url) as world:
        parent = await world.store.find_parent(session, [hash_of("a")])
        assert parent is not None
        assert parent.path_ids == (1, 2, 3, 4, 5)
