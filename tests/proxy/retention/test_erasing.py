"""Erasure on a real store: content is removed, also from the file's bytes, and claims and rewards stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, select, update

from proxy.auth.service import Credentials
from proxy.contract.arrays import pack_ids
from proxy.contract.identifiers import SessionId
from proxy.database.packed_json import pack_json
from proxy.database.tables import FeedbackTextRow, RewardRow, SessionRow, TurnRow
from proxy.errors import Gone, InvalidRequest, NotFound
from proxy.lifecycle.lifecycle import settle
from proxy.retention.erasing import EraseService, ErasureTarget, LearntFrom
from proxy.retention.repository import ErasedReason
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import fit_request, publish, versions_of

SECRET = "the patient's name is Quirinius"
IDS = tuple(range(90_001, 90_009))


def eraser(world: World) -> EraseService:
    credentials = Credentials(world.database, b"s" * 32, world.clock)
    return EraseService(world.database, world.runs, credentials, world.signals, world.clock)


async def told(world: World, *, turns: int = 2, user: str | None = None) -> SessionId:
    """Create a session with the secret in every place that stores content."""
    session_id = await world.session()
    users = (Credentials(world.database, b"s" * 32, world.clock).pseudonym(user),) if user else ()
    for number in range(turns):
        record = msgspec.structs.replace(
            world.record(session_id, prompt_ids=IDS),
            users=users,
            messages=[{"role": "user", "content": SECRET}],
            request={"model": "policy", "user": SECRET, "n": number},
            response={"choices": [{"text": SECRET}]},
        )
        await world.store.record(record)
    reward = await world.reward(session_id, 1.0)
    await world.text(session_id, SECRET)

    def work(connection: Connection) -> None:
        connection.execute(update(RewardRow).where(RewardRow.id == reward).values(comment=SECRET))
        connection.execute(
            update(SessionRow)
            .where(SessionRow.id == session_id)
            .values(task=SECRET, metadata_={"note": SECRET}, external_id=f"{SECRET} {session_id}")
        )

    await world.database.commit(work)
    return session_id


async def content(world: World, session_id: str) -> list[Any]:
    return await world.database.read(
        lambda connection: list(connection.execute(select(TurnRow).where(TurnRow.session_id == session_id)).all())
    )


async def test_content_goes_and_the_account_stays(world: World) -> None:
    session_id = await told(world)
    before = await world.session_row(session_id)
    assert before.first_message is not None
    report = await eraser(world).erase(ErasureTarget(session=session_id))
    assert (report.sessions, report.erased, report.turns, report.content_left) == (1, 1, 2, 0)
    row = await world.session_row(session_id)
    assert row.erased_at == row.emptied_at == world.clock()
    assert (row.erased_reason, row.training, row.state) == ("requested", "excluded", "ended")
    assert (row.external_id, row.task, row.metadata, row.first_message) == (None, None, None, None)
    assert (row.turn_count, row.reward, row.created_at) == (before.turn_count, before.reward, before.created_at)
    for turn in await content(world, session_id):
        assert (turn.prompt_ids, turn.output_ids, turn.output_logprobs) == (b"", b"", b"")
        assert (turn.messages, turn.request, turn.response, turn.spans) == ([], {}, {}, [])
        assert turn.prompt_token_count > 0
    (reward,) = await world.rows(RewardRow)
    assert (reward.value, reward.comment) == (1.0, None)
    assert await world.rows(FeedbackTextRow) == []
    assert await world.events("sessions.erased") == [{"count": 1, "reason": "requested", "by": "session"}]


async def test_nothing_is_left_in_the_files(world: World) -> None:
    path = Path(str(world.database.url.database))
    if world.database.url.get_backend_name() != "sqlite":
        pytest.skip("PostgreSQL keeps its files itself")
    session_id = await told(world, turns=40)
    needles = [b"Quirinius", pack_ids(IDS), pack_json([{"role": "user", "content": SECRET}])]

    def held() -> list[bool]:
        bytes_of_all = b"".join(file.read_bytes() for file in path.parent.glob(path.name + "*"))
        return [needle in bytes_of_all for needle in needles]

    assert held() == [True, True, True]
    await eraser(world).erase(ErasureTarget(session=session_id))
    assert held() == [False, False, False]


@pytest.mark.rows_by_hand
async def test_again_is_the_same_answer_and_versions_are_listed(world: World) -> None:
    session_id = await told(world)
    values = {"training": "consumed", "consumed_by": 3}
    await world.database.commit(
        lambda connection: connection.execute(update(SessionRow).where(SessionRow.id == session_id).values(**values))
    )
    first = await eraser(world).erase(ErasureTarget(session=session_id))
    again = await eraser(world).erase(ErasureTarget(session=session_id))
    assert first.versions == again.versions == (LearntFrom(run="policy", version=3, sessions=1),)
    assert (first.erased, again.erased, again.sessions) == (1, 0, 1)
    assert (await world.session_row(session_id)).training == "consumed"


async def test_all_of_a_user_is_found_and_what_comes_later_is_found_again(world: World) -> None:
    of_ada = [await told(world, user="ada"), await told(world, user="ada")]
    of_bob = await told(world, user="bob")
    service = eraser(world)
    dry = await service.erase(ErasureTarget(user="ada"), dry_run=True)
    assert (dry.sessions, dry.erased, dry.content_left, dry.dry_run) == (2, 2, 2, True)
    assert (await world.session_row(of_ada[0])).erased_at is None
    report = await service.erase(ErasureTarget(user=" ada "))
    assert (report.sessions, report.erased, report.content_left) == (2, 2, 0)
    assert (await world.session_row(of_bob)).erased_at is None
    await told(world, user="ada")
    later = await service.erase(ErasureTarget(user="ada"))
    assert (later.sessions, later.erased) == (3, 1)
    assert (await service.erase(ErasureTarget(user="eve"))).sessions == 0


async def test_an_erased_session_records_nothing_more_and_has_no_continuations(world: World) -> None:
    session_id = await told(world)
    last = await world.turn(session_id, conversation="c" * 16)
    assert await world.store.find_parent(session_id, [b"c" * 16]) is not None
    await eraser(world).erase(ErasureTarget(session=session_id))
    assert await world.store.find_parent(session_id, [b"c" * 16]) is None
    recent = await world.store.recent_turns(session_id, 8)
    assert last.turn.id in [turn.id for turn in recent]
    assert not any(turn.path_ids for turn in recent)
    with pytest.raises(Gone):
        await world.turn(session_id)
    assert len(await content(world, session_id)) == 3


async def test_a_leased_session_stays_in_its_claim_and_is_not_handed_out_again(world: World) -> None:
    session_id = await told(world)
    await world.database.commit(
        lambda connection: connection.execute(
            update(SessionRow).where(SessionRow.id == session_id).values(training="leased")
        )
    )
    report = await eraser(world).erase(ErasureTarget(session=session_id))
    assert report.leased == 1
    assert (await world.session_row(session_id)).training == "leased"

    def work(connection: Connection) -> None:
        connection.execute(update(SessionRow).where(SessionRow.id == session_id).values(training="ready"))
        settle(connection, [session_id], now=world.clock())

    await world.database.commit(work)
    assert (await world.session_row(session_id)).training == "excluded"


async def test_a_session_that_was_only_marked_is_emptied_by_the_next_sweep(world: World) -> None:
    """The process died between the mark and the removal."""
    session_id = await told(world, turns=450)
    service = eraser(world)
    await service.mark([session_id], ErasedReason.REQUESTED, by="session")
    assert (await content(world, session_id))[0].messages
    assert await eraser(world).empty() == 1
    assert all(turn.messages == [] for turn in await content(world, session_id))
    assert await eraser(world).empty() == 0


async def test_other_proxies_hear_of_it(world: World) -> None:
    session_id = await told(world)
    await eraser(world).erase(ErasureTarget(session=session_id))
    overdue = await told(world)
    await eraser(world).mark([overdue], ErasedReason.RETENTION, by="retention")
    heard: list[frozenset[str]] = []
    requested: list[frozenset[str]] = []
    world.signals.erasures.listen(heard.append)
    world.signals.requested_erasures.listen(requested.append)
    other = eraser(world)
    await other.poll_marks()
    await other.poll_marks()
    assert heard == [frozenset({session_id, overdue})]
    assert requested == [frozenset({session_id})]


async def test_calls_that_end_while_their_session_is_erased_are_kept_whole_or_not_at_all(world: World) -> None:
    session_id = await world.session()
    records = [world.record(session_id) for _ in range(20)]
    outcomes = await asyncio.gather(
        *(world.store.record(record) for record in records[:10]),
        eraser(world).erase(ErasureTarget(session=session_id)),
        *(world.store.record(record) for record in records[10:]),
        return_exceptions=True,
    )
    assert all(
        outcome is True or isinstance(outcome, Gone) for number, outcome in enumerate(outcomes) if number != 10
    )
    await eraser(world).empty()
    assert all(turn.prompt_ids == b"" for turn in await content(world, session_id))


async def test_targets_are_named_rightly(world: World) -> None:
    service = eraser(world)
    for wrong in (ErasureTarget(), ErasureTarget(session="a", user="b")):
        with pytest.raises(InvalidRequest, match="not both"):
            await service.erase(wrong)
    with pytest.raises(NotFound, match="no session 'nowhere'"):
        await service.erase(ErasureTarget(session="nowhere"))
    with pytest.raises(NotFound, match="no run 'nowhere'"):
        await service.erase(ErasureTarget(user="ada", run="nowhere"))


async def test_versions_that_were_fitted_to_it_are_named(world: World, tmp_path: Path) -> None:
    fitted, other = await told(world), await told(world)
    versions = versions_of(world)
    await versions.commit(world.run, fit_request([fitted, SessionId("ses_elsewhere")], 0, publish(tmp_path)))
    report = await eraser(world).erase(ErasureTarget(session=fitted))
    assert report.versions == (LearntFrom(run="policy", version=1, sessions=1),)
    assert (await eraser(world).erase(ErasureTarget(session=other))).versions == ()
