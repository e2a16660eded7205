"""Sessions exported from one store and imported into another, on both databases."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.auth.service import Credentials
from proxy.contract.identifiers import new_session_id
from proxy.database.tables import SessionUserRow
from proxy.errors import InvalidRequest
from proxy.transfer.reading import ExportFilter
from proxy.transfer.records import SessionRecord, encode
from proxy.transfer.service import ImportReport, TransferService
from tests.database import sqlite_database
from tests.proxy.transfer.strategies import comparable, sessions
from tests.proxy.turns.world import World, open_world


def transfer(world: World) -> TransferService:
    credentials = Credentials(world.database, b"s" * 32, world.clock)
    return TransferService(
        database=world.database,
        clock=world.clock,
        signals=world.signals,
        pseudonyms_of=credentials.pseudonyms_of,
    )


async def exported(world: World, **wanted: object) -> list[SessionRecord]:
    stream = transfer(world).export(world.run, msgspec.convert(wanted, ExportFilter))
    return [record async for record in stream]


async def add(world: World, *records: SessionRecord, train: bool = False, keep_ids: bool = False) -> ImportReport:
    body = b"".join(map(encode, records))
    return await transfer(world).add(world.run, body, first_line=1, train=train, keep_ids=keep_ids)


@given(st.lists(sessions(), max_size=3), st.booleans())
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_an_export_of_the_imported_store_equals_the_original(
    tmp_path_factory: pytest.TempPathFactory, records: list[SessionRecord], keep_ids: bool
) -> None:
    async def there_and_back() -> None:
        directory = tmp_path_factory.mktemp("stores")
        (directory / "b").mkdir()
        async with (
            open_world(sqlite_database(directory)) as first,
            open_world(sqlite_database(directory / "b")) as second,
        ):
            await add(first, *records)
            once = await exported(first)
            report = await add(second, *once, keep_ids=keep_ids)
            assert (report.imported, report.skipped) == (len(records), 0)
            twice = await exported(second)
            expected = sorted(records, key=lambda record: record.created_at)
            assert sorted(map(_text, twice)) == sorted(map(_text, once)) == sorted(map(_text, expected))
            if keep_ids:
                assert {record.session_id for record in twice} == {record.session_id for record in once}

    asyncio.run(there_and_back())


def _text(record: SessionRecord) -> str:
    return msgspec.json.encode(comparable(record), order="deterministic").decode()


async def recorded(world: World) -> SessionRecord:
    """Return an exported session of this store."""
    session_id = await world.session()
    first = await world.turn(session_id)
    await world.turn(session_id, parent=first, prefix_tokens=5, prompt_ids=(7,), output_ids=(8, 9))
    await world.reward(session_id, 0.5)
    await world.reward(session_id, 1.0, turn_id=first.turn.id, final=False)
    (record,) = [one for one in await exported(world) if one.session_id == session_id]
    return record


async def test_a_record_has_all_fields(world: World) -> None:
    record = await recorded(world)
    assert [turn.parent for turn in record.turns] == [None, 0]
    assert [turn.prompt_ids for turn in record.turns] == [(1, 2, 3), (7,)]
    assert [turn.reward for turn in record.turns] == [1.0, None]
    assert [(reward.turn, reward.value) for reward in record.rewards] == [(None, 0.5), (0, 1.0)]
    assert record.reward == 0.5
    assert record.turns[1].request == {"model": "policy"}


async def test_the_same_file_twice_adds_nothing(world: World) -> None:
    own = await recorded(world)
    assert await add(world, own) == ImportReport(imported=0, skipped=1, trainable=0)
    other = msgspec.structs.replace(own, session_id=str(new_session_id()))
    assert await add(world, other, other) == ImportReport(imported=1, skipped=1, trainable=0)
    assert await add(world, other, keep_ids=True) == ImportReport(imported=0, skipped=1, trainable=0)
    again = [record for record in await exported(world) if record.origin == other.session_id]
    assert len(again) == 1
    assert await add(world, again[0]) == ImportReport(imported=0, skipped=1, trainable=0)


async def test_imported_sessions_are_trained_only_on_request_and_if_complete(world: World) -> None:
    record = await recorded(world)

    def other(**changes: object) -> SessionRecord:
        return msgspec.structs.replace(record, session_id=str(new_session_id()), **changes)

    newer = tuple(msgspec.structs.replace(turn, versions=((7, 0, len(turn.output_ids)),)) for turn in record.turns)
    assert (await add(world, other())).trainable == 0
    report = await add(
        world,
        other(task="whole"),
        other(task="newer", turns=newer),
        other(task="none", turns=(), rewards=()),
        train=True,
    )
    assert report == ImportReport(imported=3, skipped=0, trainable=1)
    states = {one.task: (one.training, one.attributed_by) for one in await exported(world) if one.origin}
    assert states == {
        None: ("excluded", "import"),
        "whole": ("ready", "import"),
        "newer": ("excluded", "import"),
        "none": ("excluded", "import"),
    }


async def test_users_are_found_in_what_was_imported(world: World) -> None:
    record = await recorded(world)
    turns = tuple(msgspec.structs.replace(turn, request={"user": "ada"}) for turn in record.turns)
    other = msgspec.structs.replace(
        record, session_id=str(new_session_id()), turns=turns, metadata={"user_id": "ada's other name"}
    )
    await add(world, other)
    (imported,) = [one for one in await exported(world) if one.origin]
    credentials = Credentials(world.database, b"s" * 32, world.clock)
    found = {(row.session_id, bytes(row.digest)) for row in await world.rows(SessionUserRow)}
    names = ("ada", "ada's other name")
    assert found == {(imported.session_id, credentials.pseudonym(name)) for name in names}


async def test_filters(world: World) -> None:
    start = world.clock.now
    low = await world.ready(0.1, version=0)
    world.clock.now += 10
    high = await world.ready(0.9, version=2)
    world.clock.now += 10
    unrewarded = await world.session()
    eval_session = await world.session(purpose="eval")

    async def ids(**wanted: object) -> list[str]:
        return [record.session_id for record in await exported(world, **wanted)]

    assert await ids() == [low, high, *sorted([unrewarded, eval_session])]
    assert await ids(min_reward=0.5) == [high]
    assert await ids(version=0) == [low]
    assert await ids(since=start + 10, until=start + 20) == [high]
    assert await ids(purpose="eval") == [eval_session]
    assert await ids(state="open", purpose="train") == [unrewarded]
    assert await ids(training="ready") == [low, high]


async def test_pages_follow_each_other_without_a_gap(world: World) -> None:
    """Many sessions have one time, so the order of ids decides where a page ends."""
    made = [await world.session() for _ in range(40)]
    assert [record.session_id for record in await exported(world)] == sorted(made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other/1"}, r"line 2: .*`\$.format`"),
        ({"turns": 3}, r"line 2: .*`\$.turns`"),
        ({"rewards": [{"id": "x"}]}, r"line 2: .*`\$.rewards\[0\]`"),
        ({"colour": "red"}, r"line 2: .*colour"),
        ({"purpose": "play"}, r"line 2: .*`\$.purpose`"),
    ],
)
async def test_errors_name_line_and_field_and_nothing_is_added(
    world: World, change: dict[str, object], message: str
) -> None:
    good = await recorded(world)
    other = msgspec.structs.replace(good, session_id=str(new_session_id()))
    bad = msgspec.json.encode({**msgspec.to_builtins(other), **change})
    before = len(await exported(world))
    with pytest.raises(InvalidRequest, match=message):
        await transfer(world).add(world.run, encode(other) + bad, first_line=1, train=False, keep_ids=False)
    assert len(await exported(world)) == before


async def test_turns_that_do_not_hold_together_are_refused(world: World) -> None:
    record = await recorded(world)
    turn = record.turns[1]
    for changes, field in (
        ({"parent": 1}, "parent"),
        ({"prefix_tokens": 6}, "prefix_tokens"),
        ({"prompt_ids": (-1,)}, "prompt_ids"),
        ({"logprobs": (0.0,)}, "log-probabilities"),
        ({"versions": ((0, 0, 1),)}, "version spans"),
        ({"masked": ((2, 1),)}, "masked"),
        ({"tools_hash": "zz"}, "tools_hash"),
        ({"id": record.turns[0].id}, "the same id"),
    ):
        wrong = msgspec.structs.replace(turn, **changes)
        bad = msgspec.structs.replace(record, session_id="ses_new", turns=(record.turns[0], wrong))
        with pytest.raises(InvalidRequest, match=field):
            await add(world, bad)
