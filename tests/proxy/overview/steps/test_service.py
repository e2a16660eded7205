"""A step explained: its batch with rewards then and now, its inputs, and its sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import delete

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest, CommitRequest, TrajectoryAudit
from proxy.contract.identifiers import ClaimId, SessionId, TurnId
from proxy.contract.step import StepConditions, StepInputs, TokenAudit
from proxy.database.tables import TurnRow
from proxy.errors import InvalidRequest, NotFound
from proxy.overview.steps.service import StepOverview
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import audit, commit_request, publish, versions_of


async def _bracketed(_run_id: str) -> Callable[[int], str]:
    return lambda token: f"<{token}>"


CONDITIONS = StepConditions(
    trainer="0.1.0",
    torch="2.13.0",
    transformers="5.23.0",
    python="3.12.0",
    machine="x86_64 AVX2",
    device="cpu",
    device_name="cpu",
    threads=2,
    ranks=1,
)


@pytest.fixture
def steps(world: World) -> StepOverview:
    return StepOverview(world.database, _bracketed)


def tokens_of(session: SessionId, turn: TurnId) -> TokenAudit:
    return TokenAudit(
        session_id=session,
        turn_id=turn,
        logprobs=(-1.0, -0.25),
        engine_logprobs=(-1.5, -0.25),
        advantages=(0.5, 0.5),
        staleness=(1, 0),
        clipped=(True, False),
    )


async def claim(world: World, want: int) -> ClaimId:
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    return ClaimId(str((await claims.claim(world.run, ClaimRequest(trainer="t", want=want))).claim_id))


async def commit(world: World, request: CommitRequest, **step: object) -> None:
    versions = versions_of(world)
    changed = msgspec.structs.replace(request.step, **step)
    await versions.commit(world.run, msgspec.structs.replace(request, step=changed))


def audited(session: SessionId, **changes: object) -> TrajectoryAudit:
    return msgspec.structs.replace(audit(1.0), session_id=session, **changes)


async def test_a_step_is_explained(world: World, steps: StepOverview, tmp_path: Path) -> None:
    group = await world.group(size=2)
    kept = await world.ready(0.5)
    first = await claim(world, 1)
    one, two = await world.ready(1.0, group=group), await world.session(group=group)
    turn = await world.turn(two)
    turn_reward = await world.reward(two, 2.0, turn_id=turn.turn.id, final=False)
    session_reward = await world.reward(two, 0.0)
    second = await claim(world, 2)
    inputs = StepInputs(
        config={"seed": 0},
        algorithm={},
        conditions=CONDITIONS,
        trained_claim=second,
        optimizer_steps=0,
        fresh_optimizer=True,
    )
    audits = (audited(kept, skipped="no_signal", trained_tokens=0), audited(one), audited(two))
    request = commit_request([first, second], 0, publish(tmp_path))
    await commit(world, request, inputs=inputs, audit=audits, tokens=(tokens_of(two, turn.turn.id),))
    await world.reward(two, -1.0, after_training=True)

    view = await steps.step(world.run_id, "policy", 1)
    assert view.inputs == inputs
    assert [(entry.audit.session_id, entry.kept, entry.sampled, entry.group_id) for entry in view.trajectories] == [
        (kept, True, False, None),
        (one, False, False, group),
        (two, False, True, group),
    ]
    assert [(used.id, used.value, used.value_now) for used in view.trajectories[2].rewards] == [
        (turn_reward, 2.0, None),
        (session_reward, 0.0, -1.0),
    ]
    assert [entry.claim_id for entry in view.trajectories] == [first, second, second]
    assert view.step.weights_removed_at is None

    (told,) = (await steps.tokens(world.run_id, "policy", 1)).turns
    assert (told.output_ids, told.texts) == ((4, 5), ("<4>", "<5>"))
    assert (told.logprobs, told.engine_logprobs, told.advantages) == ((-1.0, -0.25), (-1.5, -0.25), (0.5, 0.5))
    assert (told.staleness, told.clipped, told.ordinal) == ((1, 0), (True, False), 0)
    assert told.ratios == pytest.approx((math.exp(0.5), 1.0))


async def test_tokens_outlive_the_texts_of_their_turns(world: World, steps: StepOverview, tmp_path: Path) -> None:
    session = await world.session()
    turn = await world.turn(session)
    await world.reward(session, 1.0)
    request = commit_request([await claim(world, 1)], 0, publish(tmp_path))
    await commit(world, request, tokens=(tokens_of(session, turn.turn.id),))
    await world.database.commit(
        lambda connection: connection.execute(delete(TurnRow).where(TurnRow.id == turn.turn.id))
    )
    (told,) = (await steps.tokens(world.run_id, "policy", 1)).turns
    assert (told.output_ids, told.texts, told.ordinal) == (None, None, None)
    assert told.logprobs == (-1.0, -0.25)


async def test_numbers_that_were_not_finite_are_shown_as_unknown(
    world: World, steps: StepOverview, tmp_path: Path
) -> None:
    session = await world.ready()
    request = commit_request([await claim(world, 1)], 0, publish(tmp_path))
    await commit(world, request, audit=(audited(session, ratio_max=math.inf),), metrics={"loss": math.nan})
    view = await steps.step(world.run_id, "policy", 1)
    answered = msgspec.json.decode(msgspec.json.encode(view))
    assert answered["trajectories"][0]["audit"]["ratio_max"] is None
    assert answered["step"]["metrics"] == {"loss": None}


async def test_a_turn_is_reported_once(world: World, tmp_path: Path) -> None:
    session = await world.ready()
    request = commit_request([await claim(world, 1)], 0, publish(tmp_path))
    twice = (tokens_of(session, TurnId("turn_1")),) * 2
    with pytest.raises(InvalidRequest, match="has a turn twice"):
        await commit(world, request, tokens=twice)


async def test_steps_that_were_not_made_are_not_found(world: World, steps: StepOverview) -> None:
    for asked in (steps.step, steps.tokens):
        with pytest.raises(NotFound):
            await asked(world.run_id, "policy", 3)
