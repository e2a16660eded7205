from __future__ import annotations

import asyncio
import random

import pytest
from sqlalchemy import Connection, insert, select

from proxy.auth.service import PrincipalKind
from proxy.contract.identifiers import new_turn_id
from proxy.contract.states import Outcome
from proxy.contract.trajectory import Purpose
from proxy.database.tables import ClaimedSessionRow, ClaimRow, RewardRow
from proxy.errors import Gone, InvalidRequest, NotFound, PermissionDenied, StoreUnavailable
from proxy.feedback.repository import FeedbackRepository
from proxy.feedback.service import Effect, FeedbackItem, FeedbackService, Receipt
from proxy.sessions.identification import SessionHints
from proxy.sessions.opening import SessionSpec
from proxy.settings import RunSettings
from tests.proxy.store import Store


async def session_with_turn(store: Store, **spec: object) -> tuple[str, str]:
    (session,) = await store.sessions.create(store.run, SessionSpec(**spec))  # type: ignore[arg-type]
    return session.id, await store.add_turn(session.id)


def reward(value: float = 1.0, **fields: object) -> FeedbackItem:
    return FeedbackItem(entries=(("reward", value),), **fields)  # type: ignore[arg-type]


async def record(store: Store, item: FeedbackItem) -> Receipt:
    (receipt,) = await store.feedback.record(store.owner, [item])
    return receipt


async def test_a_session_reward_ends_the_session_and_makes_it_ready(store: Store) -> None:
    session_id, _ = await session_with_turn(store)
    notified = store.signals.trajectories.count
    receipt = await record(store, reward(0.5, session_id=session_id))
    assert (receipt.effect, receipt.session_id, receipt.turn_id) == (Effect.RECORDED, session_id, None)
    view = await store.sessions.get(store.owner, session_id)
    assert (view.state, view.end_reason, view.training, view.reward) == ("ended", "reward", "ready", 0.5)
    assert [entry.id for entry in view.rewards] == list(receipt.rewards)
    assert store.signals.trajectories.count > notified


async def test_a_turn_reward_leaves_the_session_open_unless_it_is_final(store: Store) -> None:
    session_id, turn_id = await session_with_turn(store)
    await record(store, reward(turn_id=turn_id))
    view = await store.sessions.get(store.owner, session_id)
    assert (view.state, view.training, view.reward, view.rewards[0].turn_id) == ("open", "pending", None, turn_id)
    await record(store, reward(turn_id=turn_id, final=True))
    view = await store.sessions.get(store.owner, session_id)
    assert (view.state, view.training, view.reward) == ("ended", "ready", None)


async def test_a_reward_that_is_not_final_waits_for_the_end(store: Store) -> None:
    session_id, _ = await session_with_turn(store)
    await record(store, reward(session_id=session_id, final=False))
    assert await store.training(session_id) == "pending"
    await store.sessions.end(store.owner, session_id, Outcome.FAILED)
    assert await store.training(session_id) == "ready"


async def test_zero_is_a_reward_and_absence_is_not(store: Store) -> None:
    rewarded, _ = await session_with_turn(store)
    absent, _ = await session_with_turn(store)
    await record(store, reward(0.0, session_id=rewarded))
    await store.sessions.end(store.owner, absent, Outcome.COMPLETED)
    assert [await store.training(rewarded), await store.training(absent)] == ["ready", "pending"]
    assert (await store.sessions.get(store.owner, rewarded)).reward == 0.0
    assert (await store.sessions.get(store.owner, absent)).reward is None


async def test_an_eval_session_is_scored_and_never_ready(store: Store) -> None:
    session_id, _ = await session_with_turn(store, purpose=Purpose.EVAL)
    await record(store, reward(session_id=session_id))
    view = await store.sessions.get(store.owner, session_id)
    assert (view.training, view.reward, view.state) == ("excluded", 1.0, "ended")


async def test_a_new_value_supersedes_and_both_stay(store: Store) -> None:
    session_id, turn_id = await session_with_turn(store)
    await record(store, reward(1.0, session_id=session_id))
    await record(store, reward(0.25, session_id=session_id))
    await record(store, reward(2.0, session_id=session_id, source="judge"))
    await record(store, reward(9.0, turn_id=turn_id))
    view = await store.sessions.get(store.owner, session_id)
    assert [(entry.value, entry.superseded) for entry in view.rewards] == [
        (1.0, True),
        (0.25, False),
        (2.0, False),
        (9.0, False),
    ]
    assert view.reward == 2.25


async def test_components_have_the_weights_of_the_run(store: Store) -> None:
    await store.runs.ensure(
        RunSettings(name="policy", model="base/model", reward_weights={"format": 0.5, "speed": 0.0})
    )
    session_id, _ = await session_with_turn(store)
    entries = (("reward", 1.0), ("format", -1.0), ("speed", 100.0))
    receipt = await record(store, FeedbackItem(entries=entries, session_id=session_id))
    assert len(set(receipt.rewards)) == 3
    assert (await store.sessions.get(store.owner, session_id)).reward == 0.5


@pytest.mark.parametrize("training", ["leased", "consumed"])
async def test_after_training_a_reward_is_recorded_as_late(store: Store, training: str) -> None:
    session_id, _ = await session_with_turn(store)
    await record(store, reward(1.0, session_id=session_id))
    await store.set_session(session_id, training=training, consumed_by=1)
    receipt = await record(store, reward(0.0, session_id=session_id, idempotency_key="late"))
    assert receipt.effect is Effect.RECORDED_AFTER_TRAINING
    view = await store.sessions.get(store.owner, session_id)
    assert (view.training, view.reward) == (training, 0.0)
    assert [entry.after_training for entry in view.rewards] == [False, True]
    assert await record(store, reward(0.0, session_id=session_id, idempotency_key="late")) == receipt


async def test_the_same_idempotency_key_is_one_entry_and_one_answer(store: Store) -> None:
    session_id, turn_id = await session_with_turn(store)
    item = FeedbackItem(
        entries=(("reward", 1.0), ("format", 0.5)), session_id=session_id, idempotency_key="k", final=False
    )
    first = await record(store, item)
    assert await record(store, item) == first
    assert await record(store, reward(7.0, turn_id=turn_id, idempotency_key="k")) == first
    assert await store.reward_values(session_id) == [1.0, 0.5]
    assert (await record(store, reward(2.0, session_id=session_id, idempotency_key="k2"))) != first
    assert await store.reward_values(session_id) == [1.0, 0.5, 2.0]


async def test_the_same_key_at_the_same_time_is_one_entry(store: Store) -> None:
    session_id, _ = await session_with_turn(store)
    item = reward(session_id=session_id, idempotency_key="race")
    receipts = await asyncio.gather(*(store.feedback.record(store.owner, [item]) for _ in range(16)))
    assert len({receipt.rewards for (receipt,) in receipts}) == 1
    assert await store.reward_values(session_id) == [1.0]


async def test_one_key_twice_in_a_batch_is_one_entry(store: Store) -> None:
    session_id, _ = await session_with_turn(store)
    items = [reward(value, session_id=session_id, idempotency_key="k") for value in (1.0, 2.0)]
    first, second = await store.feedback.record(store.owner, items)
    assert first == second
    assert await store.reward_values(session_id) == [1.0]
    other, _ = await session_with_turn(store)
    with pytest.raises(InvalidRequest):
        await store.feedback.record(
            store.owner,
            [reward(session_id=other, idempotency_key="l"), reward(session_id=session_id, idempotency_key="l")],
        )
    assert await store.reward_values(other) == []
    assert await store.training(other) == "pending"


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_rewards_that_wait_together_are_recorded_as_one_by_one(store: Store, seed: int, refused: bool) -> None:
    """Sessions are open, ended, leased or evaluations, named by id or by turn; a refused reward does not affect the
    others of its group."""
    alone = await drawn_rewards(store, random.Random(seed), refused=refused)
    together = await drawn_rewards(store, random.Random(seed), refused=refused)
    one = [await effect(store, items) for items in alone[1]]
    assert one == await asyncio.gather(*(effect(store, items) for items in together[1]))
    assert (NotFound in one and InvalidRequest in one) == refused
    assert await ledgers(store, alone[0]) == await ledgers(store, together[0])


async def drawn_rewards(
    store: Store, draw: random.Random, *, refused: bool
) -> tuple[list[str], list[list[FeedbackItem]]]:
    """Sessions, and requests about them whose results do not depend on their order."""
    made = [
        await session_with_turn(store, purpose=Purpose.EVAL if number % 5 == 4 else Purpose.TRAIN)
        for number in range(20)
    ]
    for session_id, _ in made[:3]:
        await store.sessions.end(store.owner, session_id, Outcome.FAILED)
    for session_id, _ in made[3:6]:
        await record(store, reward(0.25, session_id=session_id))
        await store.set_session(session_id, training="consumed", consumed_by=1)
    requests = []
    for session_id, turn_id in made:
        about = {"turn_id": turn_id} if draw.random() < 0.3 else {"session_id": session_id}
        entries = tuple((name, draw.random()) for name in ("reward", "format")[: draw.randrange(1, 3)])
        key = f"{session_id}-key" if draw.random() < 0.5 else None
        final = draw.choice((None, False))
        item = FeedbackItem(entries=entries, idempotency_key=key, final=final, **about)
        requests += [[item]] * (2 if key else 1)
    if refused:
        requests.insert(5, [reward(session_id="unknown")])
        requests.insert(9, [reward(session_id=made[7][0], turn_id=made[8][1])])
    return [session_id for session_id, _ in made], requests


async def effect(store: Store, items: list[FeedbackItem]) -> object:
    try:
        return [receipt.effect for receipt in await store.feedback.record(store.owner, items)]
    except (NotFound, InvalidRequest) as error:
        return type(error)


async def ledgers(store: Store, session_ids: list[str]) -> list[tuple[object, ...]]:
    """Return the final state of the sessions, without names and times."""
    views = [await store.sessions.get(store.owner, session_id) for session_id in session_ids]
    return [
        (
            view.state,
            view.end_reason,
            view.training,
            view.reward,
            [(entry.name, entry.value, entry.turn_id is None, entry.after_training) for entry in view.rewards],
        )
        for view in views
    ]


async def test_rewards_that_wait_together_are_written_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [await session_with_turn(store) for _ in range(20)]
    monkeypatch.setattr(FeedbackRepository, "session", None)  # the path of a single write
    await asyncio.gather(*(record(store, reward(session_id=session_id)) for session_id, _ in made))
    assert [await store.training(session_id) for session_id, _ in made] == ["ready"] * 20


async def test_an_idempotency_key_of_another_session_is_refused(store: Store) -> None:
    first, _ = await session_with_turn(store)
    second, _ = await session_with_turn(store)
    await record(store, reward(session_id=first, idempotency_key="k"))
    with pytest.raises(InvalidRequest) as error:
        await record(store, reward(session_id=second, idempotency_key="k"))
    assert error.value.param == "idempotency_key"
    elsewhere = await store.runs.ensure(RunSettings(name="elsewhere", model="base/model"))
    (foreign,) = await store.sessions.create(elsewhere, SessionSpec())
    admin = await store.principal(PrincipalKind.ADMIN, run_id=None)
    (receipt,) = await store.feedback.record(admin, [reward(session_id=foreign.id, idempotency_key="k")])
    assert receipt.session_id == foreign.id


async def test_one_fault_in_a_batch_records_nothing_and_is_named(store: Store) -> None:
    session_id, _ = await session_with_turn(store)
    with pytest.raises(NotFound) as error:
        await store.feedback.record(store.owner, [reward(session_id=session_id), reward(session_id="unknown")])
    assert error.value.param == "[1].session_id"
    assert await store.reward_values(session_id) == []
    assert (await store.sessions.get(store.owner, session_id)).state == "open"


async def test_a_batch_settles_every_session(store: Store) -> None:
    sessions = [(await session_with_turn(store))[0] for _ in range(5)]
    items = [reward(float(index), session_id=session_id) for index, session_id in enumerate(sessions)]
    receipts = await store.feedback.record(store.owner, items)
    assert [receipt.session_id for receipt in receipts] == sessions
    assert {await store.training(session_id) for session_id in sessions} == {"ready"}


async def test_unknown_sessions_and_turns_are_refused(store: Store) -> None:
    session_id, _ = await session_with_turn(store)
    _, other_turn = await session_with_turn(store)
    for item, param in (
        (reward(session_id="unknown"), "session_id"),
        (reward(turn_id=new_turn_id()), "turn_id"),
        (reward(session_id=session_id, turn_id="chatcmpl-made-up"), "turn_id"),
    ):
        with pytest.raises(NotFound) as unknown:
            await record(store, item)
        assert unknown.value.param == param
    for item, param in ((reward(), "session_id"), (reward(session_id=session_id, turn_id=other_turn), "turn_id")):
        with pytest.raises(InvalidRequest) as wrong:
            await record(store, item)
        assert wrong.value.param == param


async def test_a_session_key_speaks_of_its_session_alone(store: Store) -> None:
    mine, other = await store.sessions.create(store.run, SessionSpec(), 2)
    my_turn, other_turn = [await store.add_turn(session.id) for session in (mine, other)]
    who = await store.credentials.authenticate(mine.api_key)
    (unnamed,) = await store.feedback.record(who, [reward()])
    (by_turn,) = await store.feedback.record(who, [reward(turn_id=my_turn, session_id=mine.id)])
    assert (unnamed.session_id, by_turn.turn_id) == (mine.id, my_turn)
    for item in (reward(session_id=other.id), reward(turn_id=other_turn), reward(session_id="unknown")):
        with pytest.raises(PermissionDenied):
            await store.feedback.record(who, [item])
    assert await store.reward_values(other.id) == []


async def test_keys_reach_as_far_as_their_run(store: Store) -> None:
    elsewhere = await store.runs.ensure(RunSettings(name="elsewhere", model="base/model"))
    (foreign,) = await store.sessions.create(elsewhere, SessionSpec())
    turn_id = await store.add_turn(foreign.id)
    for item in (reward(session_id=foreign.id), reward(turn_id=turn_id)):
        with pytest.raises(NotFound):
            await record(store, item)
    trainer = await store.principal(PrincipalKind.TRAINER, run_id=elsewhere.id)
    with pytest.raises(PermissionDenied):
        await store.feedback.record(trainer, [reward(session_id=foreign.id)])
    admin = await store.principal(PrincipalKind.ADMIN, run_id=None)
    await store.feedback.record(admin, [reward(turn_id=turn_id)])
    assert await store.reward_values(foreign.id) == [1.0]


async def test_an_expired_session_is_marked_and_becomes_ready_with_a_reward(store: Store) -> None:
    session_id, _ = await session_with_turn(store)
    await store.sessions.end(store.owner, session_id, Outcome.COMPLETED)
    store.clock.now += store.run.settings.reward_timeout_seconds
    assert (await store.sessions.sweep()).expired == 1
    view = await store.sessions.get(store.owner, session_id)
    assert (view.training, view.trainable) == ("expired", False)
    assert "no reward came in time" in view.explanation
    notified = store.signals.trajectories.count
    receipt = await record(store, reward(0.5, session_id=session_id))
    assert receipt.effect is Effect.RECORDED
    view = await store.sessions.get(store.owner, session_id)
    assert (view.training, view.reward) == ("ready", 0.5)
    assert store.signals.trajectories.count > notified
    assert (await store.sessions.sweep()).expired == 0


@pytest.mark.parametrize(("reason", "said"), [("requested", "on request"), ("retention", "by retention")])
async def test_an_erased_session_refuses_rewards_with_the_reason(store: Store, reason: str, said: str) -> None:
    session_id, turn_id = await session_with_turn(store)
    await store.set_session(session_id, erased_at=store.clock(), erased_reason=reason)
    for item in (reward(session_id=session_id), reward(turn_id=turn_id)):
        with pytest.raises(Gone, match=said):
            await record(store, item)
    assert await store.reward_values(session_id) == []


async def test_an_admin_key_needs_the_run_of_a_name(store: Store) -> None:
    elsewhere = await store.runs.ensure(RunSettings(name="elsewhere", model="base/model"))
    key = await store.credentials.create(PrincipalKind.RUN, run_id=elsewhere.id)
    other = await store.credentials.authenticate(key.text)
    ours = await store.sessions.identify(store.owner, store.run, SessionHints(path="attempt-1"))
    theirs = await store.sessions.identify(other, elsewhere, SessionHints(path="attempt-1"))
    admin = await store.principal(PrincipalKind.ADMIN, run_id=None)
    for run, session in (("policy", ours), ("elsewhere", theirs), (elsewhere.id, theirs)):
        (receipt,) = await store.feedback.record(admin, [reward(session_id="attempt-1", run=run)])
        assert receipt.session_id == session.id
    with pytest.raises(NotFound, match='give the "run"'):
        await store.feedback.record(admin, [reward(session_id="attempt-1")])
    with pytest.raises(NotFound) as unknown:
        await store.feedback.record(admin, [reward(session_id="attempt-1", run="nowhere")])
    assert unknown.value.param == "run"
    assert (await record(store, reward(session_id="attempt-1", run="policy"))).session_id == ours.id
    with pytest.raises(NotFound, match="there is no run 'elsewhere'"):
        await record(store, reward(session_id="attempt-1", run="elsewhere"))


async def test_a_component_of_weight_zero_is_not_a_reward(store: Store) -> None:
    """A component of weight 0 is stored; the session still waits for its reward."""
    await store.runs.ensure(RunSettings(name="policy", model="base/model", reward_weights={"note": 0.0}))
    session_id, _ = await session_with_turn(store)
    await record(store, FeedbackItem(entries=(("note", 3.0),), session_id=session_id, comment="it gave up early"))
    view = await store.sessions.get(store.owner, session_id)
    assert (view.state, view.training, view.reward) == ("ended", "pending", None)
    assert [entry.comment for entry in view.rewards] == ["it gave up early"]


async def test_a_session_tells_what_it_was_trained_on(store: Store) -> None:
    session_id, _ = await session_with_turn(store)
    receipt = await record(store, reward(1.0, session_id=session_id))
    claim = {"id": "clm_1", "run_id": store.run.id, "trainer": "t", "state": "committed", "base_version": 0}

    def work(connection: Connection) -> None:
        connection.execute(insert(ClaimRow).values(claim | {"created_at": 0.0, "lease_expires_at": 0.0}))
        handed = {"claim_id": "clm_1", "session_id": session_id, "position": 0, "turn_count": 1}
        connection.execute(
            insert(ClaimedSessionRow).values(handed | {"reward": 1.0, "reward_ids": list(receipt.rewards)})
        )

    await store.database.commit(work)
    await store.set_session(session_id, training="consumed", consumed_by=1, claim_id="clm_1")
    store.clock.now += 1
    await record(store, reward(0.0, session_id=session_id, source="ada"))
    await record(store, reward(0.0, session_id=session_id))
    view = await store.sessions.get(store.owner, session_id)
    assert (view.trained_reward, view.reward, view.revised_at) == (1.0, 0.0, store.clock.now)
    assert [entry.trained for entry in view.rewards] == [True, False, False]
    assert await store.sessions.count_revised() == {"policy": 1}
    await record(store, reward(1.0, session_id=session_id, source="ada"))
    await record(store, reward(0.0, session_id=session_id))
    assert await store.sessions.count_revised() == {"policy": 0}


async def test_a_clients_own_name_can_be_rewarded(store: Store) -> None:
    context = await store.sessions.identify(store.owner, store.run, SessionHints(path="task-17"))
    receipt = await record(store, reward(session_id="task-17"))
    assert receipt.session_id == context.id


async def test_the_observer_hears_of_new_entries_alone(store: Store) -> None:
    heard: list[tuple[int, str]] = []

    class Observer:
        def rewards_recorded(self, entries: int, *, effect: str) -> None:
            heard.append((entries, effect))

        def text_recorded(self, *, effect: str) -> None:
            heard.append((0, effect))

        def preference_recorded(self) -> None:
            heard.append((1, "preferred"))

    feedback = FeedbackService(store.database, store.signals, store.clock, Observer())
    session_id, _ = await session_with_turn(store)
    for _ in range(2):
        await feedback.record(store.owner, [reward(session_id=session_id, idempotency_key="k")])
        item = FeedbackItem(entries=(), session_id=session_id, text="words", idempotency_key="w")
        await feedback.record(store.owner, [item])
    assert heard == [(1, "recorded"), (0, "recorded")]


async def test_the_ledger_only_grows(store: Store) -> None:
    session_id, _ = await session_with_turn(store)
    await record(store, reward(1.0, session_id=session_id, comment="first"))

    async def rows() -> list[tuple[object, ...]]:
        statement = select(RewardRow.__table__).order_by(RewardRow.sequence)
        return await store.database.read(lambda connection: [tuple(row) for row in connection.execute(statement)])

    before = await rows()
    await record(store, reward(2.0, session_id=session_id))
    assert (await rows())[: len(before)] == before


async def test_a_full_disk_is_reported_until_there_is_space(sqlite_store: Store) -> None:
    store = sqlite_store
    session_id, _ = await session_with_turn(store)
    long = reward(session_id=session_id, comment="x" * 64_000)

    def bound(connection: Connection, more: int) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + more}")

    await store.database.commit(lambda connection: bound(connection, 0))
    with pytest.raises(StoreUnavailable, match="full"):
        await record(store, long)
    assert await store.reward_values(session_id) == []
    assert (await store.sessions.get(store.owner, session_id)).state == "open"
    await store.database.commit(lambda connection: bound(connection, 1000))
    await record(store, long)
    assert await store.training(session_id) == "ready"
