"""Preferences exported from a store and imported into another one, on both databases."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sqlalchemy import insert, update

from proxy.contract.identifiers import new_preference_id
from proxy.database.tables import PreferenceRow, SessionRow
from proxy.errors import InvalidRequest
from proxy.transfer.preferences import (
    PreferenceFilter,
    PreferenceRecord,
    decode_preference,
    encode_preference,
)
from proxy.transfer.records import InvalidRecord, encode
from tests.database import sqlite_database
from tests.proxy.transfer.test_service import exported, transfer
from tests.proxy.turns.world import World, open_world


async def preferred(world: World, chosen: Any, rejected: Any, **columns: Any) -> str:
    """Record a preference. Sides are session ids, or (session id, turn id)."""
    sides = [side if isinstance(side, tuple) else (side, None) for side in (chosen, rejected)]
    values = {
        "id": new_preference_id(),
        "run_id": world.run_id,
        "chosen_session_id": sides[0][0],
        "chosen_turn_id": sides[0][1],
        "rejected_session_id": sides[1][0],
        "rejected_turn_id": sides[1][1],
        "source": "api",
        "created_at": world.clock(),
        **columns,
    }
    await world.database.commit(lambda connection: connection.execute(insert(PreferenceRow).values(**values)))
    return str(values["id"])


async def tree(world: World) -> tuple[str, list[str]]:
    """Create a session of three turns: the second and the third continue the first."""
    session = await world.session()
    first = await world.turn(session)
    others = [
        await world.turn(session, parent=first, prefix_tokens=5, prompt_ids=(7,), output_ids=(8 + index, 9))
        for index in range(2)
    ]
    return session, [record.turn.id for record in (first, *others)]


async def all_of(world: World, **wanted: Any) -> list[PreferenceRecord]:
    stream = transfer(world).export_preferences(world.run, PreferenceFilter(**wanted))
    return [record async for record in stream]


async def test_each_has_both_sides_with_what_was_recorded(world: World) -> None:
    better, turns = await tree(world)
    worse = await world.ready(0.25)
    whole = await preferred(world, better, worse, source="ada", comment="shorter")
    part = await preferred(world, (better, turns[2]), (better, turns[1]))
    first, second = await all_of(world)
    assert (first.id, first.source, first.comment, first.run) == (whole, "ada", "shorter", "policy")
    assert [turn.id for turn in first.chosen.turns] == turns
    assert all(turn.preferred for turn in first.chosen.turns)
    assert first.chosen.turns[1].prompt_ids == (7,)
    assert first.chosen.turns[1].parent == 0
    assert first.rejected.turns[0].output_ids == (4, 5)
    assert first.rejected.turns[0].logprobs == (-0.5, -0.5)
    assert first.rejected.reward == 0.25
    assert second.id == part
    assert [(turn.id, turn.parent, turn.preferred) for turn in second.chosen.turns] == [
        (turns[0], None, False),
        (turns[2], 0, True),
    ]
    assert second.chosen.turns[1].output_ids == (9, 9)
    assert (second.chosen.place, second.rejected.place) == (2, 1)
    assert decode_preference(encode_preference(second)) == second


async def test_filters_and_pages(world: World) -> None:
    one, other = await world.ready(), await world.ready()
    start = world.clock.now
    made = []
    for index in range(40):
        world.clock.now += 1
        made.append(await preferred(world, one, other, source=f"s{index % 2}"))
    assert [record.id for record in await all_of(world)] == made
    assert [record.id for record in await all_of(world, since=start + 3, until=start + 5)] == made[2:4]
    assert [record.id for record in await all_of(world, source="s1")] == made[1::2]


async def test_preferences_about_an_erased_session_are_left_out(world: World) -> None:
    one, other, third = [await world.ready() for _ in range(3)]
    await preferred(world, one, other)
    kept = await preferred(world, one, third)
    await world.database.commit(
        lambda connection: connection.execute(
            update(SessionRow).where(SessionRow.id == other).values(erased_at=world.clock())
        )
    )
    assert [record.id for record in await all_of(world)] == [kept]


@pytest.mark.parametrize("keep_ids", [True, False])
async def test_into_another_store(world: World, tmp_path_factory: pytest.TempPathFactory, keep_ids: bool) -> None:
    better, turns = await tree(world)
    worse = await world.ready()
    await preferred(world, better, worse, comment="so")
    await preferred(world, (better, turns[2]), (better, turns[1]))
    lines = [encode_preference(record) for record in await all_of(world)]
    body = b"".join(lines)
    async with open_world(sqlite_database(tmp_path_factory.mktemp("there"))) as there:
        with pytest.raises(InvalidRequest, match=r"line 1: .*import its sessions first"):
            await transfer(there).add_preferences(there.run, body, first_line=1)
        sessions = b"".join(map(encode, await exported(world)))
        await transfer(there).add(there.run, sessions, first_line=1, train=False, keep_ids=keep_ids)
        for imported, skipped in ((2, 0), (0, 2)):
            report = await transfer(there).add_preferences(there.run, body, first_line=1)
            assert (report.imported, report.skipped) == (imported, skipped)
        again = await all_of(there)
        assert [_tokens(record) for record in again] == [_tokens(decode_preference(line)) for line in lines]
        assert [record.origin for record in again] == [decode_preference(line).id for line in lines]
    report = await transfer(world).add_preferences(world.run, body, first_line=1)
    assert report.skipped == 2, "they are this store's own"


def _tokens(record: PreferenceRecord) -> Any:
    return [
        [(turn.parent, turn.prompt_ids, turn.output_ids, turn.preferred) for turn in side.turns]
        for side in (record.chosen, record.rejected)
    ]


async def test_an_invalid_preference_is_refused(world: World) -> None:
    with pytest.raises(InvalidRequest, match="line 7"):
        await transfer(world).add_preferences(world.run, b'{"format": 1}', first_line=7)
    one, other = await world.ready(), await world.ready()
    await preferred(world, one, other)
    (record,) = await all_of(world)
    with pytest.raises(InvalidRecord, match="format"):
        decode_preference(encode_preference(msgspec.structs.replace(record, format="other/1")))
