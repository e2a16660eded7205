from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from proxy.auth.service import PrincipalKind
from proxy.contract.identifiers import new_session_id
from proxy.contract.states import Outcome, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.database.tables import EventRow, GroupRow, SessionRow
from proxy.database.unit_of_work import Database
from proxy.errors import InvalidRequest, ModelNotFound, NotFound, PermissionDenied
from proxy.feedback.service import FeedbackItem
from proxy.sessions.identification import AttributedBy, Name, SessionHints
from proxy.sessions.opening import SessionSpec
from proxy.sessions.sweeping import Swept
from proxy.settings import RunSettings
from tests.proxy.store import Store


async def count(store: Store, table: type[SessionRow] | type[GroupRow]) -> int:
    return await store.database.read(
        lambda connection: connection.execute(select(func.count()).select_from(table)).scalar_one()
    )


async def test_a_session_has_a_key_of_its_own(store: Store) -> None:
    (session,) = await store.sessions.create(store.run, SessionSpec(task="2+2", metadata={"level": 1}))
    who = await store.credentials.authenticate(session.api_key)
    assert (who.kind, who.session_id, who.run_id) == (PrincipalKind.SESSION, session.id, store.run.id)
    view = await store.sessions.get(who, session.id)
    assert (view.task, view.metadata, view.state, view.training, view.group_id) == (
        "2+2",
        {"level": 1},
        "open",
        "pending",
        None,
    )
    assert (view.trainable, "open" in view.explanation) == (False, True)


async def test_n_sessions_are_one_group_of_that_size(store: Store) -> None:
    sessions = await store.sessions.create(store.run, SessionSpec(), 8)
    assert len({session.id for session in sessions}) == len({session.api_key for session in sessions}) == 8
    (group_id,) = {session.group_id for session in sessions}
    group = await store.database.read(lambda connection: connection.execute(select(GroupRow.__table__)).one())
    assert (group.id, group.name, group.size) == (group_id, group_id, 8)


async def test_a_named_group_is_joined_and_keeps_its_size(store: Store) -> None:
    (first,) = await store.sessions.create(store.run, SessionSpec(group="task-1"))
    second = await store.sessions.create(store.run, SessionSpec(group="task-1", group_size=4), 2)
    third = await store.sessions.create(store.run, SessionSpec(group="task-1"), 1)
    assert {session.group_id for session in (first, *second, *third)} == {first.group_id}
    with pytest.raises(InvalidRequest) as error:
        await store.sessions.create(store.run, SessionSpec(group="task-1", group_size=8))
    assert error.value.param == "group_size"
    assert await count(store, SessionRow) == 4

    def work(connection: Connection) -> None:
        assert connection.execute(select(GroupRow.size)).scalar_one() == 4

    await store.database.read(work)


async def test_groups_asked_for_at_once_are_one(store: Store) -> None:
    created = await asyncio.gather(
        *(store.sessions.create(store.run, SessionSpec(group="same", group_size=8)) for _ in range(8))
    )
    assert len({session.group_id for (session,) in created}) == 1


async def test_the_first_hint_that_applies_decides(store: Store) -> None:
    by_path = await store.sessions.identify(
        store.owner, store.run, SessionHints(path="mine", named=Name(AttributedBy.HEADER, "other"))
    )
    by_header = await store.sessions.identify(
        store.owner, store.run, SessionHints(named=Name(AttributedBy.HEADER, "mine"))
    )
    by_own_id = await store.sessions.identify(store.owner, store.run, SessionHints(path=by_path.id))
    assert by_path.id == by_header.id == by_own_id.id
    assert [context.attributed_by for context in (by_path, by_header, by_own_id)] == ["path", "header", "path"]
    assert await count(store, SessionRow) == 1


async def test_a_session_key_names_its_session(store: Store) -> None:
    mine, other = await store.sessions.create(store.run, SessionSpec(purpose=Purpose.EVAL), 2)
    who = await store.credentials.authenticate(mine.api_key)
    context = await store.sessions.identify(who, store.run, SessionHints(named=Name(AttributedBy.HEADER, "ignored")))
    assert (context.id, context.attributed_by, context.purpose, context.group_id) == (
        mine.id,
        AttributedBy.KEY,
        Purpose.EVAL,
        mine.group_id,
    )
    by_path = await store.sessions.identify(who, store.run, SessionHints(path=mine.id))
    assert (by_path.id, by_path.attributed_by) == (mine.id, AttributedBy.PATH)
    for foreign in (other.id, "made-up", new_session_id()):
        with pytest.raises(PermissionDenied):
            await store.sessions.identify(who, store.run, SessionHints(path=foreign))
    assert await count(store, SessionRow) == 2


async def test_calls_that_open_one_name_at_once_share_the_session(store: Store) -> None:
    contexts = await asyncio.gather(
        *(store.sessions.identify(store.owner, store.run, SessionHints(path="race")) for _ in range(16)),
        *(
            store.sessions.identify(store.owner, store.run, SessionHints(named=Name(AttributedBy.HEADER, "race")))
            for _ in range(16)
        ),
    )
    assert len({context.id for context in contexts}) == 1
    assert await count(store, SessionRow) == 1


async def test_an_id_of_ours_is_never_made_up(store: Store) -> None:
    with pytest.raises(NotFound):
        await store.sessions.identify(store.owner, store.run, SessionHints(path=new_session_id()))
    elsewhere = await store.runs.ensure(RunSettings(name="elsewhere", model="base/model"))
    (foreign,) = await store.sessions.create(elsewhere, SessionSpec())
    with pytest.raises(NotFound):
        await store.sessions.identify(store.owner, store.run, SessionHints(path=foreign.id))
    with pytest.raises(NotFound):
        await store.sessions.get(store.owner, foreign.id)


async def test_keys_of_other_runs_and_kinds_make_no_calls(store: Store) -> None:
    elsewhere = await store.runs.ensure(RunSettings(name="elsewhere", model="base/model"))
    with pytest.raises(ModelNotFound):
        await store.sessions.identify(store.owner, elsewhere, SessionHints())
    for kind, run_id in ((PrincipalKind.TRAINER, store.run.id), (PrincipalKind.ADMIN, None)):
        with pytest.raises(PermissionDenied):
            await store.sessions.identify(await store.principal(kind, run_id=run_id), store.run, SessionHints())


async def test_a_conversation_continues_in_its_session(store: Store) -> None:
    long, short, foreign = b"l" * 16, b"s" * 16, b"f" * 16
    opened = await store.sessions.identify(store.owner, store.run, SessionHints(group="g"))
    assert opened.attributed_by is AttributedBy.NEW
    assert opened.group_id is not None
    other = await store.sessions.identify(store.owner, store.run, SessionHints(conversation_hashes=(long,)))
    assert other.id != opened.id
    await store.add_turn(opened.id, conversation_hash=short)
    await store.add_turn(other.id, conversation_hash=long)

    async def found(*hashes: bytes) -> tuple[str, str]:
        hints = SessionHints(conversation_hashes=hashes)
        context = await store.sessions.identify(store.owner, store.run, hints)
        return context.id, context.attributed_by.value

    assert await found(foreign, short) == (opened.id, "conversation")
    assert await found(long, short) == (other.id, "conversation")
    many = tuple(bytes([index]) * 15 + b"-" for index in range(100, 250))
    assert await found(*many, short) == (opened.id, "conversation")


async def test_a_conversation_is_found_only_under_its_key_and_while_it_is_open(store: Store) -> None:
    value = b"c" * 16
    opened = await store.sessions.identify(store.owner, store.run, SessionHints())
    await store.add_turn(opened.id, conversation_hash=value)
    hints = SessionHints(conversation_hashes=(value,))
    stranger = await store.principal(PrincipalKind.RUN, run_id=store.run.id)
    assert (await store.sessions.identify(stranger, store.run, hints)).id != opened.id
    assert (await store.sessions.identify(store.owner, store.run, hints)).id == opened.id
    await store.sessions.end(store.owner, opened.id, Outcome.COMPLETED)
    after = await store.sessions.identify(store.owner, store.run, hints)
    assert (after.id != opened.id, after.attributed_by) == (True, AttributedBy.NEW)


async def test_equal_conversations_continue_separately(store: Store) -> None:
    first, second = b"1" * 16, b"2" * 16
    sessions = [await store.sessions.identify(store.owner, store.run, SessionHints()) for _ in range(2)]
    for session in sessions:
        await store.add_turn(session.id, conversation_hash=first)
    found = []
    for _ in sessions:
        hints = SessionHints(conversation_hashes=(first,))
        context = await store.sessions.identify(store.owner, store.run, hints)
        await store.add_turn(context.id, conversation_hash=second)
        found.append(context.id)
    assert sorted(found) == sorted(session.id for session in sessions)


async def test_ending_is_once_and_a_late_outcome_fills_in(store: Store) -> None:
    (session,) = await store.sessions.create(store.run, SessionSpec())
    await store.add_turn(session.id)
    first = await store.sessions.end(store.owner, session.id, Outcome.FAILED)
    assert (first.state, first.outcome, first.end_reason, first.training) == (
        "ended",
        "failed",
        "explicit",
        "excluded",
    )
    store.clock.now += 5
    again = await store.sessions.end(store.owner, session.id, Outcome.COMPLETED)
    assert (again.outcome, again.ended_at) == ("failed", first.ended_at)


async def test_the_end_of_an_attempt_without_calls_is_reported(store: Store) -> None:
    (session,) = await store.sessions.create(store.run, SessionSpec())
    view = await store.sessions.end(store.owner, session.id, Outcome.COMPLETED)
    assert (view.training, view.explanation) == ("excluded", "It ended without a model call.")


async def test_who_may_see_and_end(store: Store) -> None:
    mine, other = await store.sessions.create(store.run, SessionSpec(), 2)
    own = await store.credentials.authenticate(mine.api_key)
    admin = await store.principal(PrincipalKind.ADMIN, run_id=None)
    trainer = await store.principal(PrincipalKind.TRAINER, run_id=store.run.id)
    for who in (own, admin, store.owner):
        assert (await store.sessions.get(who, mine.id)).id == mine.id
    for name in (other.id, "unknown"):
        with pytest.raises(PermissionDenied):
            await store.sessions.get(own, name)
        with pytest.raises(PermissionDenied):
            await store.sessions.end(own, name, Outcome.COMPLETED)
    with pytest.raises(PermissionDenied):
        await store.sessions.get(trainer, mine.id)
    for who in (admin, store.owner):
        with pytest.raises(NotFound):
            await store.sessions.get(who, "unknown")


async def test_a_clients_own_name_is_as_good_as_the_id(store: Store) -> None:
    context = await store.sessions.identify(store.owner, store.run, SessionHints(path="task-17"))
    turn_id = await store.add_turn(context.id)
    view = await store.sessions.get(store.owner, "task-17")
    assert (view.id, view.external_id, view.attributed_by) == (context.id, "task-17", "path")
    (turn,) = view.turns
    assert (turn.id, turn.ordinal, turn.output_tokens, turn.finish_reason, turn.continuation) == (
        turn_id,
        0,
        2,
        "stop",
        "new",
    )


async def test_idle_sessions_end_and_only_those(store: Store) -> None:
    idle, rewarded, active = await store.sessions.create(store.run, SessionSpec(), 3)
    (patient,) = await store.sessions.create(store.run, SessionSpec(ttl=5000))
    (hasty,) = await store.sessions.create(store.run, SessionSpec(ttl=10))
    turn_id = await store.add_turn(rewarded.id)
    await store.feedback.record(store.owner, [FeedbackItem(entries=(("reward", 1.0),), turn_id=turn_id)])
    await store.add_turn(idle.id)
    store.clock.now += 11
    assert await store.sessions.sweep() == Swept(ended=1, expired=0)
    store.clock.now += 889
    await store.add_turn(active.id)
    notified = store.signals.trajectories.count
    assert await store.sessions.sweep() == Swept(ended=2, expired=0)
    assert store.signals.trajectories.count > notified
    assert await store.sessions.sweep() == Swept(ended=0, expired=0)
    states = {}
    for session in (idle, rewarded, active, patient, hasty):
        view = await store.sessions.get(store.owner, session.id)
        states[session.id] = (view.state, view.end_reason, view.training)
    assert states == {
        idle.id: ("ended", "idle", "pending"),
        rewarded.id: ("ended", "idle", "ready"),
        active.id: ("open", None, "pending"),
        patient.id: ("open", None, "pending"),
        hasty.id: ("ended", "idle", "excluded"),
    }


async def test_the_sweep_ends_sessions_of_each_run_by_its_own_settings(store: Store) -> None:
    hasty = await store.runs.ensure(RunSettings(name="hasty", model="base/model", session_idle_seconds=10))
    await store.sessions.create(store.run, SessionSpec())
    await store.sessions.create(hasty, SessionSpec())
    store.clock.now += 11
    assert await store.sessions.sweep() == Swept(ended=1, expired=0)
    assert await store.sessions.sweep() == Swept(ended=0, expired=0)
    store.clock.now += 889
    assert await store.sessions.sweep() == Swept(ended=1, expired=0)


async def test_a_sweep_reads_as_often_with_one_run_as_with_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    read = Database.read

    async def counted(database: Database, *arguments: Any, **options: Any) -> Any:
        nonlocal reads
        reads += database is store.database  # and not that of a proxy that another test has not stopped yet
        return await read(database, *arguments, **options)

    monkeypatch.setattr(Database, "read", counted)
    await store.sessions.sweep()
    alone, reads = reads, 0
    for number in range(5):
        await store.runs.ensure(RunSettings(name=f"other-{number}", model="base/model"))
    reads = 0
    await store.sessions.sweep()
    assert reads == alone


async def test_a_sweep_of_many_takes_several_batches(store: Store) -> None:
    await store.sessions.create(store.run, SessionSpec(), 1024)
    store.clock.now += 900
    assert await store.sessions.sweep() == Swept(ended=1024, expired=0)


async def test_without_a_reward_a_session_expires_visibly_and_a_late_reward_revives_it(store: Store) -> None:
    (session,) = await store.sessions.create(store.run, SessionSpec())
    await store.add_turn(session.id)
    await store.sessions.end(store.owner, session.id, Outcome.COMPLETED)
    store.clock.now += 86399
    assert await store.sessions.sweep() == Swept(ended=0, expired=0)
    store.clock.now += 1
    assert await store.sessions.sweep() == Swept(ended=0, expired=1)
    view = await store.sessions.get(store.owner, session.id)
    assert (view.training, view.trainable) == ("expired", False)
    events = await store.database.read(
        lambda connection: connection.execute(select(EventRow.kind, EventRow.data)).all()
    )
    assert tuple(events[-1]) == ("session.expired", {"count": 1})
    await store.feedback.record(store.owner, [FeedbackItem(entries=(("reward", 0.0),), session_id=session.id)])
    assert await store.training(session.id) == "ready"


@pytest.mark.parametrize("training", [state for state in TrainingState if state is not TrainingState.PENDING])
async def test_every_state_is_explained(store: Store, training: TrainingState) -> None:
    (session,) = await store.sessions.create(store.run, SessionSpec())
    await store.set_session(session.id, state="ended", training=training.value, turn_count=1, consumed_by=7)
    view = await store.sessions.get(store.owner, session.id)
    assert re.fullmatch(r"[A-Z].*\.|.*;.*\.", view.explanation)
    assert view.trainable == (training in (TrainingState.READY, TrainingState.LEASED, TrainingState.CONSUMED))
