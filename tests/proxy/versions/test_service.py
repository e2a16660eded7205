from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimedBatch, ClaimRequest, CommitReply
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import Head, Probe
from proxy.database.tables import ClaimRow, PolicyVersionRow
from proxy.errors import Conflict, InvalidRequest, WeightsRejected
from proxy.settings import ConfigurationError, RunSettings
from proxy.versions.rejections import Rejections
from proxy.versions.service import VersionService
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, fit_request, publish, versions_of


@pytest.fixture
def versions(world: World) -> VersionService:
    return versions_of(world)


@pytest.fixture
def claims(world: World) -> ClaimService:
    return ClaimService(database=world.database, clock=world.clock, signals=world.signals)


async def claimed(world: World, claims: ClaimService, sessions: int = 1) -> tuple[ClaimId, ClaimedBatch]:
    for _ in range(sessions):
        await world.ready()
    batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=sessions))
    assert batch.claim_id is not None
    return batch.claim_id, batch


async def test_the_head_of_a_new_run_is_the_base_model(world: World, versions: VersionService) -> None:
    head = await versions.head(world.run)
    assert head == Head(
        run_id=world.run_id,
        run_name="policy",
        version=0,
        base_model="base/model",
        weights=None,
        max_new_tokens=world.run.settings.max_new_tokens,
    )


async def test_a_commit_makes_a_version_and_consumes_its_trajectories(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    session = await world.ready()
    claim_id, _ = await claimed(world, claims)
    weights = publish(tmp_path)
    given = world.signals.versions.count
    reply = await versions.commit(world.run, commit_request([claim_id], 0, weights))
    assert reply == CommitReply(version=1, repeated=False)
    row = await world.session_row(session)
    assert (row.training, row.consumed_by, row.claim_id) == ("consumed", 1, claim_id)
    (claim,) = await world.rows(ClaimRow)
    assert (claim.state, claim.committed_version) == ("committed", 1)
    head = await versions.head(world.run)
    assert (head.version, head.weights) == (1, weights)
    assert world.signals.versions.count > given
    assert await world.events("version.committed") == [
        {"version": 1, "parent": 0, "claims": 1, "sessions": 1, "metrics": {"loss": 0.25}}
    ]
    newest, base = await versions.list_(world.run)
    assert (newest.version, newest.parent, newest.state) == (1, 0, "committed")
    assert newest.weights == msgspec.structs.replace(weights, files={})
    assert newest.metrics == {"loss": 0.25}
    assert (base.version, base.parent, base.state, base.weights) == (0, None, "serving", None)


async def test_the_probe_is_stored_with_its_version(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    for version, probe in enumerate([Probe(ids=(3, 1, 2), logprobs=(-0.5, -2.0)), None]):
        claim_id, _ = await claimed(world, claims)
        request = commit_request([claim_id], version, publish(tmp_path))
        await versions.commit(world.run, msgspec.structs.replace(request, probe=probe))
    stored = {row.version: row.probe for row in await world.rows(PolicyVersionRow)}
    assert stored == {0: None, 1: {"ids": [3, 1, 2], "logprobs": [-0.5, -2.0]}, 2: None}


async def test_a_commit_of_several_claims(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    first, _ = await claimed(world, claims, 2)
    second, _ = await claimed(world, claims, 3)
    request = commit_request([first, second], 0, publish(tmp_path))
    assert (await versions.commit(world.run, request)).version == 1
    assert (await world.events("version.committed"))[0]["sessions"] == 5
    swapped = msgspec.structs.replace(request, claim_ids=(second, first))
    assert await versions.commit(world.run, swapped) == CommitReply(version=1, repeated=True)


async def test_a_repeated_commit_is_answered_alike(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    claim_id, _ = await claimed(world, claims)
    request = commit_request([claim_id], 0, publish(tmp_path))
    await versions.commit(world.run, request)
    next_claim, _ = await claimed(world, claims)
    await versions.commit(world.run, commit_request([next_claim], 1, publish(tmp_path)))
    for file in Path(request.weights.uri).iterdir():
        file.unlink()
    world.clock.now += 10_000
    assert await versions.commit(world.run, request) == CommitReply(version=1, repeated=True)
    assert len(await world.rows(PolicyVersionRow)) == 3


async def test_the_same_commit_at_the_same_time(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    claim_id, _ = await claimed(world, claims)
    request = commit_request([claim_id], 0, publish(tmp_path))
    replies = await asyncio.gather(*(versions.commit(world.run, request) for _ in range(4)))
    assert {reply.version for reply in replies} == {1}
    assert sorted(reply.repeated for reply in replies) == [False, True, True, True]


async def test_other_weights_for_consumed_trajectories_are_refused(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    claim_id, _ = await claimed(world, claims)
    await versions.commit(world.run, commit_request([claim_id], 0, publish(tmp_path)))
    for parent in (0, 1):
        with pytest.raises(Conflict):
            await versions.commit(world.run, commit_request([claim_id], parent, publish(tmp_path)))
    assert (await versions.head(world.run)).version == 1


async def test_a_commit_on_an_old_head_is_refused(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    first, _ = await claimed(world, claims)
    second, batch = await claimed(world, claims)
    await versions.commit(world.run, commit_request([first], 0, publish(tmp_path)))
    with pytest.raises(Conflict, match="head is version 1"):
        await versions.commit(world.run, commit_request([second], 0, publish(tmp_path)))
    session = batch.groups[0].trajectories[0].session_id
    assert (await world.session_row(session)).training == "leased"
    reply = await versions.commit(world.run, commit_request([second], 1, publish(tmp_path)))
    assert reply == CommitReply(version=2, repeated=False)


async def test_an_expired_lease_is_refused(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    claim_id, batch = await claimed(world, claims)
    request = commit_request([claim_id], 0, publish(tmp_path))
    world.clock.now = batch.lease_expires_at
    with pytest.raises(Conflict, match="no live lease"):
        await versions.commit(world.run, request)
    await claims.expire()
    with pytest.raises(Conflict, match="no live lease"):
        await versions.commit(world.run, request)
    assert (await versions.head(world.run)).version == 0
    again = await claims.claim(world.run, ClaimRequest(trainer="t", want=1))
    assert again.trajectory_count == 1


async def test_a_renewed_lease_is_honoured(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    claim_id, batch = await claimed(world, claims)
    world.clock.now = batch.lease_expires_at - 1
    await claims.heartbeat(world.run, claim_id)
    world.clock.now += 100
    assert (await versions.commit(world.run, commit_request([claim_id], 0, publish(tmp_path)))).version == 1


async def test_a_released_or_unknown_claim_is_refused(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    claim_id, _ = await claimed(world, claims)
    await claims.release(world.run, claim_id)
    for gone in (claim_id, ClaimId("clm_unknown")):
        with pytest.raises(Conflict):
            await versions.commit(world.run, commit_request([gone], 0, publish(tmp_path)))


async def test_numbers_that_json_cannot_hold_become_null(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    claim_id, _ = await claimed(world, claims)
    await versions.commit(world.run, commit_request([claim_id], 0, publish(tmp_path), loss=float("nan")))
    row = (await world.rows(PolicyVersionRow))[-1]
    assert row.metrics == {"loss": None}
    assert (row.audit[0]["ratio_min"], row.audit[0]["advantage"]) == (None, 0.5)


@pytest.mark.parametrize(
    ("damage", "param"),
    [
        ({"uri": "relative/directory"}, "weights.uri"),
        ({"uri": "/nonexistent/weights"}, "weights.uri"),
        ({"bytes": 3}, "weights.bytes"),
        ({"sha256": "x"}, "weights.sha256"),
        ({"sha256": "0" * 64}, "weights.sha256"),
        ({"files": {}}, "weights.files"),
        ({"files": {"../config.json": "0" * 64}}, "weights.files"),
    ],
)
async def test_missing_weights_are_refused(
    world: World,
    versions: VersionService,
    claims: ClaimService,
    tmp_path: Path,
    damage: dict[str, object],
    param: str,
) -> None:
    claim_id, _ = await claimed(world, claims)
    weights = msgspec.structs.replace(publish(tmp_path), **damage)
    with pytest.raises(InvalidRequest) as refused:
        await versions.commit(world.run, commit_request([claim_id], 0, weights))
    assert refused.value.param == param


async def test_a_directory_without_weights_is_refused(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    claim_id, _ = await claimed(world, claims)
    weights = publish(tmp_path)
    (Path(weights.uri) / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest):
        await versions.commit(world.run, commit_request([claim_id], 0, weights))


async def test_weights_far_from_their_parent_are_refused_before_they_consume_anything(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    tensors = {"weight": np.array([0.5, -0.5], np.float32)}
    claim_id, _ = await claimed(world, claims)
    await versions.commit(world.run, commit_request([claim_id], 0, publish(tmp_path, tensors)))
    session = await world.ready()
    claim_id, _ = await claimed(world, claims)
    far = publish(tmp_path, {"weight": tensors["weight"] * 1000})
    with pytest.raises(WeightsRejected, match=r"weight went from 0\.5 to 500"):
        await versions.commit(world.run, commit_request([claim_id], 1, far))
    assert (await versions.head(world.run)).version == 1
    assert (await world.session_row(session)).training == "leased"


async def test_bad_weights_are_refused_before_they_consume_anything(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    session = await world.ready()
    claim_id, _ = await claimed(world, claims)
    bad = publish(tmp_path, {"weight": np.array([1.0, np.nan], np.float32)})
    with pytest.raises(WeightsRejected, match=r"weight in model\.safetensors has values that are not finite"):
        await versions.commit(world.run, commit_request([claim_id], 0, bad))
    assert (await versions.head(world.run)).version == 0
    assert (await world.session_row(session)).training == "leased"
    assert (await versions.commit(world.run, commit_request([claim_id], 0, publish(tmp_path)))).version == 1


async def test_a_rejected_version_gives_the_head_back_and_keeps_its_number_and_sessions(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    good = publish(tmp_path)
    consumed = []
    for parent, weights in enumerate((good, publish(tmp_path))):
        claim_id, batch = await claimed(world, claims)
        consumed.append(batch.groups[0].trajectories[0].session_id)
        await versions.commit(world.run, commit_request([claim_id], parent, weights))
    rejections = Rejections(database=world.database, signals=world.signals, clock=world.clock, run_id=world.run_id)
    for _ in range(2):
        await rejections.reject(2, "two bits fell over")
    assert await world.events("version.rejected") == [{"version": 2, "reason": "two bits fell over", "head": 1}]
    head = await versions.head(world.run)
    assert (head.version, head.weights) == (1, good)
    newest, *_ = await versions.list_(world.run)
    assert (newest.version, newest.state, newest.rejected_because) == (2, "rejected", "two bits fell over")
    assert [(await world.session_row(each)).consumed_by for each in consumed] == [1, 2]
    claim_id, _ = await claimed(world, claims)
    with pytest.raises(Conflict, match="the head is version 1"):
        await versions.commit(world.run, commit_request([claim_id], 2, publish(tmp_path)))
    after = commit_request([claim_id], 1, publish(tmp_path))
    assert await versions.commit(world.run, after) == CommitReply(version=3, repeated=False)
    assert await versions.commit(world.run, after) == CommitReply(version=3, repeated=True)
    assert (await versions.head(world.run)).version == 3


async def test_the_base_model_is_never_rejected(world: World, versions: VersionService) -> None:
    rejections = Rejections(database=world.database, signals=world.signals, clock=world.clock, run_id=world.run_id)
    await rejections.reject(0, "no reason")
    assert [each.state for each in await versions.list_(world.run)] == ["serving"]


async def test_a_commit_names_each_of_its_claims_once(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    claim_id, _ = await claimed(world, claims)
    for claim_ids in ([], [claim_id, claim_id]):
        with pytest.raises(InvalidRequest):
            await versions.commit(world.run, commit_request(claim_ids, 0, publish(tmp_path)))


async def test_a_version_that_was_fitted_has_no_claims(
    world: World, versions: VersionService, claims: ClaimService, tmp_path: Path
) -> None:
    session = await world.ready()
    fitted = fit_request([session], 0, publish(tmp_path))
    for repeated in (False, True):
        assert await versions.commit(world.run, fitted) == CommitReply(version=1, repeated=repeated)
    assert (await world.session_row(session)).training == "ready", "nobody claimed it"
    other = fit_request([session], 0, publish(tmp_path))
    with pytest.raises(Conflict, match="the head is version 1"):
        await versions.commit(world.run, other)
    claim_id, _ = await claimed(world, claims)
    with pytest.raises(InvalidRequest, match="consumes no claims"):
        await versions.commit(world.run, msgspec.structs.replace(other, claim_ids=(claim_id,), parent_version=1))
    assert (await versions.commit(world.run, commit_request([claim_id], 1, publish(tmp_path)))).version == 2


async def test_versions_of_an_adapter_run_are_adapters(
    world: World, versions: VersionService, tmp_path: Path
) -> None:
    settings = RunSettings(name="small", model="base/model", weights="adapter", trainer={"seed": 3})
    run = await world.runs.ensure(settings)
    head = await versions.head(run)
    assert (head.weights_kind, head.trainer) == ("adapter", {"seed": 3})
    with pytest.raises(InvalidRequest, match=r"must be an adapter.*trainer\.adapter") as refused:
        await versions.commit(run, commit_request([ClaimId("clm_1")], 0, publish(tmp_path)))
    assert refused.value.param == "weights.format"
    with pytest.raises(ConfigurationError, match=r"run\.weights.*another kind of weights"):
        await world.runs.ensure(settings.model_copy(update={"weights": "full"}))
