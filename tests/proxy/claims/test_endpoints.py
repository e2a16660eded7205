from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from proxy.auth.service import PrincipalKind
from proxy.contract.claim import AbandonedProcess, ClaimRequest, LeaseReply, ReleasedClaims, encode
from tests.proxy.turns.trainer_client import TrainerClient, open_trainer, read
from tests.proxy.turns.world import World

WISH = ClaimRequest(trainer="t", want=1)


@pytest.fixture
async def trainer(world: World) -> AsyncIterator[TrainerClient]:
    async with open_trainer(world) as client:
        yield client


async def test_claim_heartbeat_and_release(trainer: TrainerClient, world: World) -> None:
    session = await world.ready(0.5)
    batch = await trainer.claim()
    (group,) = batch.groups
    assert (group.trajectories[0].session_id, group.trajectories[0].reward) == (session, 0.5)
    world.clock.now += 10
    lease = read(await trainer.post(f"/claims/{batch.claim_id}/heartbeat"), LeaseReply)
    assert lease.lease_expires_at == batch.lease_expires_at + 10
    assert (await trainer.post(f"/claims/{batch.claim_id}/release")).status_code == 204
    assert (await world.session_row(session)).training == "ready"
    assert (await trainer.post(f"/claims/{batch.claim_id}/heartbeat")).status_code == 409


async def test_a_claim_without_ready_trajectories_returns_an_empty_batch(trainer: TrainerClient) -> None:
    batch = await trainer.claim()
    assert (batch.claim_id, batch.groups, batch.base_version) == (None, (), 0)


async def test_a_run_may_be_named_by_its_id(trainer: TrainerClient, world: World) -> None:
    answer = await trainer.http.post(f"/api/v1/runs/{world.run_id}/claims", content=encode(WISH))
    assert answer.status_code == 200
    assert (await trainer.http.post("/api/v1/runs/other/claims", content=encode(WISH))).status_code == 404


async def test_unknown_claims_are_conflicts(trainer: TrainerClient) -> None:
    for action in ("heartbeat", "release"):
        answer = await trainer.post(f"/claims/clm_unknown/{action}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"\xc1", None),
        (b'{"want": 1}', None),
        (encode({"trainer": "t", "want": "many"}), "want"),
        (encode({"trainer": "t", "want": 1, "wnat": 2}), None),
        (encode({"trainer": "t", "want": 0}), "want"),
        (encode({"trainer": "t", "want": 1, "wait_s": 3600}), "wait_s"),
    ],
)
async def test_invalid_bodies_are_refused(trainer: TrainerClient, body: bytes, param: str | None) -> None:
    answer = await trainer.post("/claims", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_who_may_claim(trainer: TrainerClient, world: World) -> None:
    expected = {PrincipalKind.ADMIN: 200, PrincipalKind.TRAINER: 200, PrincipalKind.RUN: 403}
    for kind, status in expected.items():
        run_id = None if kind is PrincipalKind.ADMIN else world.run_id
        headers = await trainer.key(kind, run_id=run_id)
        assert (await trainer.post("/claims", WISH, headers=headers)).status_code == status
    wrong = {"authorization": "Bearer rl-trainer-wrong"}
    assert (await trainer.post("/claims", WISH, headers=wrong)).status_code == 401


async def test_a_key_of_another_run_may_not_claim(trainer: TrainerClient, world: World) -> None:
    other = await world.runs.ensure(world.run.settings.model_copy(update={"name": "other"}))
    headers = await trainer.key(PrincipalKind.TRAINER, run_id=other.id)
    assert (await trainer.post("/claims", WISH, headers=headers)).status_code == 404


async def test_a_waiting_claim_is_answered_when_something_is_ready(trainer: TrainerClient, world: World) -> None:
    waiting = asyncio.create_task(trainer.claim(wait_s=30.0))
    session = await world.ready()
    async with asyncio.timeout(60):
        batch = await waiting
    assert batch.groups[0].trajectories[0].session_id == session


async def test_waiting_ends_when_the_proxy_stops(trainer: TrainerClient) -> None:
    waiting = asyncio.create_task(trainer.claim(wait_s=60.0))
    await asyncio.sleep(0)
    trainer.claims.close()
    async with asyncio.timeout(60):
        assert (await waiting).claim_id is None


async def test_claims_of_a_dead_trainer_are_released_and_listed(trainer: TrainerClient, world: World) -> None:
    await world.ready()
    batch = await trainer.claim(process="dead")
    released = read(await trainer.post("/claims/abandoned", AbandonedProcess(process="dead")), ReleasedClaims)
    assert released.claim_ids == (batch.claim_id,)
    answer = await trainer.http.get("/api/v1/runs/policy/claims")
    assert [(claim["id"], claim["process"], claim["state"]) for claim in answer.json()["claims"]] == [
        (batch.claim_id, "dead", "released")
    ]
    for limit in ("0", "201", "many"):
        assert (await trainer.http.get(f"/api/v1/runs/policy/claims?limit={limit}")).status_code in (400, 422)


async def test_agents_keys_may_not_claim(trainer: TrainerClient, world: World) -> None:
    agent = await trainer.key(PrincipalKind.RUN, run_id=world.run_id)
    dead = encode(AbandonedProcess(process="dead"))
    assert (await trainer.http.get("/api/v1/runs/policy/claims", headers=agent)).status_code == 403
    assert (await trainer.post("/claims/abandoned", dead, headers=agent)).status_code == 403
    assert (await trainer.http.get("/api/v1/runs/policy/steps/1/batch", headers=agent)).status_code == 403
