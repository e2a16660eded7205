from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from proxy.auth.service import PrincipalKind
from proxy.contract.claim import CommitReply, encode
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import Head, PruneReply, PruneRequest
from proxy.contract.replay import StepBatch
from tests.proxy.turns.trainer_client import TrainerClient, open_trainer, read
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, publish


@pytest.fixture
async def trainer(world: World) -> AsyncIterator[TrainerClient]:
    async with open_trainer(world) as client:
        yield client


async def head(trainer: TrainerClient) -> Head:
    return read(await trainer.http.get("/api/v1/runs/policy/head"), Head)


async def test_a_step_over_http(trainer: TrainerClient, world: World, tmp_path: Path) -> None:
    assert (await head(trainer)).version == 0
    await world.ready()
    batch = await trainer.claim()
    assert batch.claim_id is not None
    request = commit_request([batch.claim_id], 0, publish(tmp_path))
    first = read(await trainer.post("/versions", request), CommitReply)
    again = read(await trainer.post("/versions", request), CommitReply)
    assert (first, again) == (CommitReply(version=1, repeated=False), CommitReply(version=1, repeated=True))
    assert (await head(trainer)).weights == request.weights
    late = await trainer.post("/versions", msgspec.structs.replace(request, weights=publish(tmp_path)))
    assert (late.status_code, late.json()["error"]["param"]) == (409, "parent_version")


async def test_versions_are_listed_as_json(trainer: TrainerClient, world: World, tmp_path: Path) -> None:
    await world.ready()
    batch = await trainer.claim()
    assert batch.claim_id is not None
    weights = publish(tmp_path)
    await trainer.post("/versions", commit_request([batch.claim_id], 0, weights))
    answer = await trainer.http.get("/api/v1/runs/policy/versions", headers=await trainer.key(PrincipalKind.ADMIN))
    newest, base = answer.json()["versions"]
    assert newest == {
        "version": 1,
        "parent": 0,
        "state": "committed",
        "weights": {"uri": weights.uri, "format": "huggingface", "sha256": weights.sha256, "bytes": weights.bytes},
        "is_saved": True,
        "weights_removed_at": None,
        "rejected_because": None,
        "metrics": {"loss": 0.25},
        "created_at": world.clock.now,
        "canary_at": None,
        "served_at": None,
        "swap_seconds": None,
        "begun_from": None,
    }
    assert (base["version"], base["weights"], base["state"]) == (0, None, "serving")


async def test_bad_commits_are_refused(trainer: TrainerClient, world: World, tmp_path: Path) -> None:
    await world.ready()
    batch = await trainer.claim()
    assert batch.claim_id is not None
    request = commit_request([batch.claim_id], 0, publish(tmp_path))
    wrong = msgspec.to_builtins(request) | {"parent_version": "0"}
    unreadable = [
        encode(commit_request([batch.claim_id], 0, msgspec.structs.replace(request.weights, uri=uri)))
        for uri in (f"/{'x' * 5000}", f"/{'x' * 300}", f"{tmp_path}/{'x' * 300}", "/a\0b")
    ]
    cases = [
        *((body, "weights.uri") for body in unreadable),
        (b"not msgpack", None),
        (encode(wrong), "parent_version"),
        *(
            (encode(msgspec.to_builtins(request) | {"probe": {"ids": ids, "logprobs": logprobs}}), "probe")
            for ids, logprobs in (([1], []), ([1, 2], []), ([1, -2], [-1.0]), ([1, 2], [0.5]), ([1, 2], [math.nan]))
        ),
        (encode(msgspec.structs.replace(request, claim_ids=())), "claim_ids"),
        (
            encode(commit_request([batch.claim_id], 0, msgspec.structs.replace(request.weights, uri="/nowhere"))),
            "weights.uri",
        ),
    ]
    for body, param in cases:
        answer = await trainer.post("/versions", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    assert (await head(trainer)).version == 0


async def test_agents_may_not_publish(trainer: TrainerClient, world: World) -> None:
    headers = await trainer.key(PrincipalKind.RUN, run_id=world.run_id)
    for path in ("head", "versions"):
        answer = await trainer.http.get(f"/api/v1/runs/policy/{path}", headers=headers)
        assert answer.status_code == 403
    assert (await trainer.post("/versions", b"", headers=headers)).status_code == 403


async def test_old_weights_are_marked_and_returned(trainer: TrainerClient, world: World, tmp_path: Path) -> None:
    uris = []
    for parent in range(2):
        await world.ready(version=parent)
        batch = await trainer.claim()
        weights = publish(tmp_path)
        await trainer.post("/versions", commit_request([ClaimId(str(batch.claim_id))], parent, weights))
        uris.append(weights.uri)
    asked = await trainer.post("/versions/prune", PruneRequest(keep=1, present=tuple(uris)))
    assert read(asked, PruneReply).remove == (uris[0],)
    listed = (await trainer.http.get("/api/v1/runs/policy/versions")).json()["versions"]
    assert [version["weights_removed_at"] for version in listed] == [None, world.clock.now, None]
    step = await trainer.http.get("/api/v1/runs/policy/steps/2/batch")
    assert read(step, StepBatch).parent_removed
    refused = await trainer.post("/versions/prune", PruneRequest(keep=0, present=()))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "keep")
