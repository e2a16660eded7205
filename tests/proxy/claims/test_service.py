from __future__ import annotations

import asyncio

import pytest

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimedBatch, ClaimRequest
from proxy.contract.identifiers import ClaimId
from proxy.contract.states import Outcome
from proxy.contract.turn import TurnState
from proxy.database.tables import ClaimedSessionRow, ClaimRow
from proxy.errors import Conflict, InvalidRequest
from proxy.turns.first_messages import first_message_hash
from tests.proxy.turns.world import World


@pytest.fixture
def claims(world: World) -> ClaimService:
    return ClaimService(database=world.database, clock=world.clock, signals=world.signals)


def wish(want: int = 1, **changes: float) -> ClaimRequest:
    return ClaimRequest(trainer="trainer-1", want=want, **changes)  # type: ignore[arg-type]


def sessions_of(batch: ClaimedBatch) -> list[str]:
    return [trajectory.session_id for group in batch.groups for trajectory in group.trajectories]


async def test_a_claim_leases_what_it_hands_out(world: World, claims: ClaimService) -> None:
    session = await world.session()
    turn = await world.turn(session, output_ids=(7, 8))
    reward = await world.reward(session, 0.5)
    turn_reward = await world.reward(session, 2.0, turn_id=turn.turn.id)
    batch = await claims.claim(world.run, wish())
    assert batch.base_version == 0
    assert batch.lease_expires_at == world.clock.now + world.run.settings.lease_seconds
    (group,) = batch.groups
    (trajectory,) = group.trajectories
    assert (group.id, trajectory.session_id, trajectory.reward) == (None, session, 0.5)
    (node,) = trajectory.turns
    assert (node.output_ids, node.logprobs, node.reward, node.trainable) == ((7, 8), (-0.5, -0.5), 2.0, True)
    row = await world.session_row(session)
    assert (row.training, row.claim_id) == ("leased", batch.claim_id)
    (claimed,) = await world.rows(ClaimedSessionRow)
    assert (claimed.session_id, claimed.reward, claimed.turn_count) == (session, 0.5, 1)
    assert set(claimed.reward_ids) == {reward, turn_reward}


async def test_sessions_with_one_question_come_with_one_first_message(world: World, claims: ClaimService) -> None:
    """Whatever the system's message says, and whatever is asked later."""
    wanted: dict[str, bytes | None] = {}
    for system, question in (("Monday", "2 + 3?"), ("Tuesday", "2 + 3?"), ("Monday", "3 + 4?")):
        session = await world.session()
        asked = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        first = await world.turn(session, messages=asked)
        later = [{"role": "user", "content": "And 9 + 9?"}]
        await world.turn(session, parent=first, prefix_tokens=5, messages=later)
        await world.turn(session, messages=later)
        await world.reward(session, 1.0)
        wanted[session] = first_message_hash(asked)
    batch = await claims.claim(world.run, wish(want=3))
    found = {each.session_id: each.first_message for group in batch.groups for each in group.trajectories}
    assert found == wanted
    assert len(set(found.values())) == 2
    assert None not in found.values()


@pytest.mark.parametrize("on_the_loop", [0, 512])
async def test_each_turn_has_its_own_reward_and_most_have_none(
    world: World, claims: ClaimService, monkeypatch: pytest.MonkeyPatch, on_the_loop: int
) -> None:
    monkeypatch.setattr("proxy.claims.service.REWARDED_ON_LOOP", on_the_loop)
    rewarded = []
    for value in (2.0, 3.0):
        session = await world.session()
        first = await world.turn(session)
        second = await world.turn(session, parent=first, prefix_tokens=5)
        await world.reward(session, value, turn_id=second.turn.id)
        await world.end(session)
        rewarded.append((session, None, [None, value]))
    batch = await claims.claim(world.run, wish(want=2))
    found = [trajectory for group in batch.groups for trajectory in group.trajectories]
    assert [(each.session_id, each.reward, [node.reward for node in each.turns]) for each in found] == rewarded


async def test_turns_from_before_the_clock_was_set_back_stay_trainable(world: World, claims: ClaimService) -> None:
    session = await world.session()
    turn = await world.turn(session)
    world.clock.now -= 10_000
    await world.reward(session, 1.0)
    (group,) = (await claims.claim(world.run, wish())).groups
    assert [node.id for node in group.trajectories[0].turns] == [turn.turn.id]


async def test_nothing_is_handed_out_twice(world: World, claims: ClaimService) -> None:
    wanted = {await world.ready() for _ in range(6)}
    batches = await asyncio.gather(*(claims.claim(world.run, wish(2)) for _ in range(4)))
    taken = [session for batch in batches for session in sessions_of(batch)]
    assert len(taken) == len(set(taken)) == 6
    assert set(taken) == wanted
    assert [batch.claim_id is None for batch in batches].count(True) == 1


async def test_first_ready_first(world: World, claims: ClaimService) -> None:
    order = []
    for _ in range(4):
        world.clock.now += 1
        order.append(await world.ready())
    batch = await claims.claim(world.run, wish(2))
    assert sessions_of(batch) == order[:2]
    assert batch.max_new_tokens == world.run.settings.max_new_tokens


async def test_too_few_is_an_empty_batch(world: World, claims: ClaimService) -> None:
    session = await world.ready()
    batch = await claims.claim(world.run, wish(4, at_least=2))
    assert batch == ClaimedBatch(claim_id=None, lease_expires_at=world.clock.now, base_version=0, groups=())
    assert (await world.session_row(session)).training == "ready"
    assert await world.rows(ClaimRow) == []


async def test_open_unrewarded_evaluated_and_failed_sessions_are_not_claimed(
    world: World, claims: ClaimService
) -> None:
    still_open = await world.session()
    await world.turn(still_open)
    await world.reward(still_open, 1.0, final=False)
    unrewarded = await world.session()
    await world.turn(unrewarded)
    await world.end(unrewarded)
    evaluated = await world.session(purpose="eval")
    await world.turn(evaluated)
    await world.reward(evaluated, 1.0)
    failed = await world.session()
    await world.turn(failed)
    await world.end(failed, Outcome.FAILED)
    assert (await claims.claim(world.run, wish())).claim_id is None


async def test_a_group_is_claimed_whole(world: World, claims: ClaimService) -> None:
    group = await world.group(size=3)
    members = [await world.ready(float(index), group=group) for index in range(2)]
    late = await world.session(group=group)
    assert (await claims.claim(world.run, wish())).claim_id is None
    await world.turn(late)
    await world.reward(late, 1.0)
    batch = await claims.claim(world.run, wish())
    assert [item.id for item in batch.groups] == [group]
    assert sessions_of(batch) == [*members, late]


async def test_an_incomplete_group_is_claimable_after_its_time_out(world: World, claims: ClaimService) -> None:
    group = await world.group(size=3)
    for _ in range(2):
        await world.ready(group=group)
    await world.session(group=group)
    world.clock.now += world.run.settings.group_timeout_seconds - 1
    assert (await claims.claim(world.run, wish())).claim_id is None
    world.clock.now += 1
    assert len(sessions_of(await claims.claim(world.run, wish()))) == 2


async def test_a_late_member_of_a_trained_group_is_not_lost(world: World, claims: ClaimService) -> None:
    group = await world.group(size=3)
    for _ in range(2):
        await world.ready(group=group)
    late = await world.session(group=group)
    world.clock.now += world.run.settings.group_timeout_seconds
    await claims.claim(world.run, wish())
    await world.turn(late)
    await world.reward(late, 1.0)
    assert sessions_of(await claims.claim(world.run, wish())) == [late]


async def test_too_old_trajectories_become_stale(world: World, claims: ClaimService) -> None:
    old, young = await world.ready(version=0), await world.ready(version=3)
    await world.set_run(head_version=5)
    batch = await claims.claim(world.run, wish(1, max_staleness=2))
    assert sessions_of(batch) == [young]
    assert batch.base_version == 5
    assert (await world.session_row(old)).training == "stale"
    assert await world.events("sessions.stale") == [{"count": 1, "head": 5, "max_staleness": 2}]


async def test_stale_sessions_are_marked_even_if_nothing_is_left_to_claim(world: World, claims: ClaimService) -> None:
    old = await world.ready(version=0)
    await world.set_run(head_version=5)
    assert (await claims.claim(world.run, wish())).claim_id is None
    assert (await world.session_row(old)).training == "stale"


async def test_a_paused_run_hands_nothing_out(world: World, claims: ClaimService) -> None:
    await world.ready()
    await world.set_run(state="paused")
    assert (await claims.claim(world.run, wish())).claim_id is None
    await world.set_run(state="active")
    assert (await claims.claim(world.run, wish())).claim_id is not None


async def test_a_conversation_that_goes_on_with_a_clock_set_back_costs_no_session(
    world: World, claims: ClaimService
) -> None:
    """Its calls are after the end, whatever their time is."""
    session = await world.ready()
    world.clock.now += 1
    late = await world.turn(session)
    world.clock.now -= 1000
    later = await world.turn(session, parent=late, prefix_tokens=4, prompt_ids=(7,))
    await world.turn(session, parent=later, prefix_tokens=6, prompt_ids=(8,))
    world.clock.now += 1000
    (group,) = (await claims.claim(world.run, wish())).groups
    (trajectory,) = group.trajectories
    assert (trajectory.session_id, len(trajectory.turns)) == (session, 1)


async def test_calls_after_the_end_are_not_trained(world: World, claims: ClaimService) -> None:
    session = await world.session()
    kept = await world.turn(session)
    running = world.record(session)
    await world.reward(session, 1.0)
    world.clock.now += 1
    await world.turn(session)
    await world.store.record(running)
    (group,) = (await claims.claim(world.run, wish())).groups
    assert [turn.id for turn in group.trajectories[0].turns] == [kept.turn.id, running.turn.id]


async def test_a_session_with_nothing_to_train_is_excluded(world: World, claims: ClaimService) -> None:
    greedy = await world.session()
    await world.turn(greedy, temperature=0.0)
    await world.turn(greedy, state=TurnState.FAILED)
    await world.turn(greedy, output_ids=())
    await world.reward(greedy, 1.0)
    late = await world.session()
    await world.reward(late, 1.0)
    world.clock.now += 1
    await world.turn(late)
    assert [(await world.session_row(session)).training for session in (greedy, late)] == ["excluded"] * 2
    await world.hold_ready(greedy, late)
    good = await world.ready()
    batch = await claims.claim(world.run, wish(3))
    assert sessions_of(batch) == [good]
    for session in (greedy, late):
        row = await world.session_row(session)
        assert (row.training, row.claim_id) == ("excluded", None)
    assert [row.session_id for row in await world.rows(ClaimedSessionRow)] == [good]
    assert await world.events("sessions.excluded") == [{"count": 2, "reason": "no trainable turn"}]


async def test_a_claim_with_nothing_trainable_leases_nothing(world: World, claims: ClaimService) -> None:
    session = await world.session()
    await world.turn(session, temperature=0.0)
    await world.reward(session, 1.0)
    await world.hold_ready(session)
    assert (await claims.claim(world.run, wish())).claim_id is None
    assert [row.state for row in await world.rows(ClaimRow)] == ["released"]


async def test_greedy_turns_stay_in_the_tree(world: World, claims: ClaimService) -> None:
    session = await world.session()
    root = await world.turn(session, temperature=0.0)
    await world.turn(session, parent=root, prefix_tokens=5, prompt_ids=(6,))
    await world.reward(session, 1.0)
    (group,) = (await claims.claim(world.run, wish())).groups
    nodes = group.trajectories[0].turns
    assert [(node.parent, node.trainable) for node in nodes] == [(None, False), (0, True)]


async def test_a_waiting_claim_is_woken(world: World, claims: ClaimService) -> None:
    waiting = asyncio.create_task(claims.claim(world.run, wish(2, wait_s=30.0)))
    first, second = await world.ready(), await world.ready()
    async with asyncio.timeout(60):
        assert sessions_of(await waiting) == [first, second]


async def test_waiting_ends_with_the_available_sessions(world: World, claims: ClaimService) -> None:
    session = await world.ready()
    async with asyncio.timeout(60):
        assert sessions_of(await claims.claim(world.run, wish(2, wait_s=0.05))) == [session]


async def test_a_disconnected_trainer_gets_no_lease(world: World, claims: ClaimService) -> None:
    async def gone() -> bool:
        return True

    session = await world.ready()
    assert (await claims.claim(world.run, wish(), abandoned=gone)).claim_id is None
    assert (await world.session_row(session)).training == "ready"


async def test_a_lease_expires(world: World, claims: ClaimService) -> None:
    session = await world.ready()
    batch = await claims.claim(world.run, wish())
    world.clock.now = batch.lease_expires_at - 1
    assert await claims.expire() == 0
    world.clock.now += 1
    assert await claims.expire() == 1
    row = await world.session_row(session)
    assert (row.training, row.claim_id) == ("ready", None)
    again = await claims.claim(world.run, wish())
    assert sessions_of(again) == [session]
    assert again.claim_id != batch.claim_id
    assert sorted(row.state for row in await world.rows(ClaimRow)) == ["expired", "leased"]


async def test_a_claim_takes_sessions_of_an_expired_lease(world: World, claims: ClaimService) -> None:
    session = await world.ready()
    batch = await claims.claim(world.run, wish())
    world.clock.now = batch.lease_expires_at
    assert sessions_of(await claims.claim(world.run, wish())) == [session]
    assert len(await world.events("claim.expired")) == 1


async def test_many_leases_expire_at_once(world: World, claims: ClaimService) -> None:
    for _ in range(40):
        await world.ready()
        assert (await claims.claim(world.run, wish())).claim_id is not None
    world.clock.now += world.run.settings.lease_seconds
    assert await claims.expire() == 40
    assert len(sessions_of(await claims.claim(world.run, wish(40)))) == 40


async def test_a_heartbeat_extends_the_lease(world: World, claims: ClaimService) -> None:
    await world.ready()
    batch = await claims.claim(world.run, wish())
    assert batch.claim_id is not None
    world.clock.now = batch.lease_expires_at - 1
    lease = await claims.heartbeat(world.run, batch.claim_id)
    assert lease.lease_expires_at == world.clock.now + world.run.settings.lease_seconds
    world.clock.now = lease.lease_expires_at - 1
    assert await claims.expire() == 0


async def test_a_late_heartbeat_is_refused(world: World, claims: ClaimService) -> None:
    await world.ready()
    batch = await claims.claim(world.run, wish())
    assert batch.claim_id is not None
    world.clock.now = batch.lease_expires_at
    with pytest.raises(Conflict, match="expired"):
        await claims.heartbeat(world.run, batch.claim_id)
    with pytest.raises(Conflict, match="no claim"):
        await claims.heartbeat(world.run, ClaimId("clm_unknown"))


async def test_released_sessions_are_claimable_at_once(world: World, claims: ClaimService) -> None:
    session = await world.ready()
    batch = await claims.claim(world.run, wish())
    assert batch.claim_id is not None
    await claims.release(world.run, batch.claim_id)
    await claims.release(world.run, batch.claim_id)
    assert (await world.session_row(session)).training == "ready"
    with pytest.raises(Conflict):
        await claims.heartbeat(world.run, batch.claim_id)
    assert sessions_of(await claims.claim(world.run, wish())) == [session]


async def test_rewards_during_a_lease_count_if_it_ends_without_a_commit(world: World, claims: ClaimService) -> None:
    session = await world.ready(1.0)
    batch = await claims.claim(world.run, wish())
    await world.reward(session, 0.0, after_training=True)
    assert (await world.session_row(session)).training == "leased"
    world.clock.now = batch.lease_expires_at
    (group,) = (await claims.claim(world.run, wish())).groups
    assert group.trajectories[0].reward == 0.0
    assert (await world.session_row(session)).reward == 0.0


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"want": 0}, "want"),
        ({"want": 10**6}, "want"),
        ({"at_least": 0}, "at_least"),
        ({"at_least": 2}, "at_least"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"wait_s": -1.0}, "wait_s"),
        ({"wait_s": 61.0}, "wait_s"),
        ({"wait_s": float("nan")}, "wait_s"),
    ],
)
async def test_invalid_requests_are_refused(
    world: World, claims: ClaimService, changes: dict[str, float], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await claims.claim(world.run, wish(**changes))  # type: ignore[arg-type]
    assert refused.value.param == param
