"""Versions that are committed from memory, and what becomes of them when they reach the disk or never do."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest, CommitReply, CommitRequest
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import STATE_INDEX, UNCOMMITTED_MARK, WeightsReference
from proxy.database.tables import ClaimRow, SessionRow
from proxy.errors import Conflict, NotFound, WeightsMissing, WeightsRejected
from proxy.lifecycle.check import check
from proxy.versions.inspector import WeightsInspector
from proxy.versions.saving import UnsavedVersions
from proxy.versions.service import VersionService
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, publish, reference


class Memory:
    """A trainer's two places for a version, and the services of a proxy that sees both."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.disk, self.memory = directory / "weights", directory / "memory"
        inspector = WeightsInspector(self.disk, memory=self.memory)
        services = {"database": world.database, "clock": world.clock, "signals": world.signals}
        self.versions = VersionService(**services, inspector=inspector)  # type: ignore[arg-type]
        self.unsaved = UnsavedVersions(**services, inspector=inspector)  # type: ignore[arg-type]
        self.claims = ClaimService(**services)  # type: ignore[arg-type]

    async def claim(self) -> ClaimId:
        await self.world.ready()
        return await self.claim_ready()

    async def claim_ready(self) -> ClaimId:
        batch = await self.claims.claim(self.world.run, ClaimRequest(trainer="t", want=1, max_staleness=100))
        assert batch.claim_id is not None
        return batch.claim_id

    def write(self) -> WeightsReference:
        """Write a version to the memory, and return its reference with a directory that does not exist yet."""
        place = Path(publish(self.memory / "run_x").uri)
        weights = msgspec.structs.replace(reference(place), uri=str(self.disk / "run_x" / place.name))
        (place / UNCOMMITTED_MARK).touch()
        (self.disk / "run_x").mkdir(parents=True, exist_ok=True)
        return weights

    def copy(self, weights: WeightsReference) -> WeightsReference:
        """Write a version's directory, with a trainer state, as the trainer does after the commit."""
        directory = Path(weights.uri)
        shutil.copytree(self.memory / "run_x" / directory.name, directory, ignore=lambda *_: [UNCOMMITTED_MARK])
        state = directory / STATE_INDEX
        state.parent.mkdir()
        state.write_text("{}")
        return msgspec.structs.replace(weights, files={**weights.files, STATE_INDEX: "a" * 64})

    async def commit(self) -> CommitRequest:
        head = await self.versions.head(self.world.run)
        request = commit_request([await self.claim()], head.version, self.write())
        request = msgspec.structs.replace(request, is_saved=False)
        await self.versions.commit(self.world.run, request)
        return request

    async def head(self) -> tuple[int, bool]:
        head = await self.versions.head(self.world.run)
        return head.version, head.is_saved

    async def saved(self) -> list[bool]:
        return [version.is_saved for version in await self.versions.list_(self.world.run)]

    async def training(self) -> list[tuple[str, int | None]]:
        return sorted((row.training, row.consumed_by) for row in await self.world.rows(SessionRow))


@pytest.fixture
def memory(world: World, tmp_path: Path) -> Memory:
    return Memory(world, tmp_path)


async def test_a_version_in_memory_is_the_head_and_consumes_its_claims_once_it_is_on_the_disk(
    memory: Memory, database_url: str
) -> None:
    request = await memory.commit()
    assert await memory.head() == (1, False)
    assert await memory.saved() == [False, True]
    assert await memory.training() == [("leased", None)]
    assert (await memory.world.events("version.committed"))[0]["sessions"] == 1
    assert await memory.versions.commit(memory.world.run, request) == CommitReply(version=1, repeated=True)
    durable = memory.copy(request.weights)
    told = memory.world.signals.versions.count
    assert await memory.unsaved.save(memory.world.run, 1, durable) == CommitReply(version=1, repeated=False)
    assert memory.world.signals.versions.count > told
    assert await memory.training() == [("consumed", 1)]
    assert await memory.head() == (1, True)
    assert await memory.saved() == [True, True]
    assert (await memory.versions.head(memory.world.run)).weights == durable
    assert await memory.unsaved.save(memory.world.run, 1, durable) == CommitReply(version=1, repeated=True)
    assert await memory.versions.commit(memory.world.run, request) == CommitReply(version=1, repeated=True)
    await memory.unsaved.take_back(memory.world.run)
    assert await memory.head() == (1, True)
    assert check(database_url) == []


async def test_a_version_that_never_reached_the_disk_is_taken_back_and_its_sessions_are_trained_again(
    memory: Memory, database_url: str
) -> None:
    request = await memory.commit()
    await memory.unsaved.take_back(memory.world.run)
    assert await memory.head() == (0, True)
    states = [each.state for each in await memory.versions.list_(memory.world.run)]
    assert states == ["rolled_back", "serving"]
    assert await memory.saved() == [False, True]
    (event,) = await memory.world.events("version.rolled_back")
    assert (event["to"], event["versions"], event["by"]) == (0, [1], "trainer")
    with pytest.raises(Conflict, match="was withdrawn"):
        await memory.unsaved.save(memory.world.run, 1, memory.copy(request.weights))
    await memory.claims.release(memory.world.run, request.claim_ids[0])
    again = commit_request([await memory.claim_ready()], 0, publish(memory.disk))
    assert await memory.versions.commit(memory.world.run, again) == CommitReply(version=2, repeated=False)
    assert await memory.training() == [("consumed", 2)]
    assert check(database_url) == []


async def test_a_version_whose_leases_expired_is_not_saved(memory: Memory) -> None:
    request = await memory.commit()
    (claim,) = await memory.world.rows(ClaimRow)
    memory.world.clock.now = claim.lease_expires_at + 1
    with pytest.raises(Conflict, match="no live lease"):
        await memory.unsaved.save(memory.world.run, 1, memory.copy(request.weights))
    assert await memory.head() == (1, False)


async def test_nothing_is_committed_on_a_version_that_is_not_on_the_disk(memory: Memory) -> None:
    await memory.commit()
    claim_id = await memory.claim()
    with pytest.raises(Conflict, match="version 1 is in its trainer's memory"):
        await memory.versions.commit(memory.world.run, commit_request([claim_id], 1, publish(memory.disk)))


async def test_reports_about_other_versions_are_refused(memory: Memory) -> None:
    request = await memory.commit()
    with pytest.raises(WeightsMissing, match="there is no directory"):
        await memory.unsaved.save(memory.world.run, 1, request.weights)
    durable = memory.copy(request.weights)
    with pytest.raises(NotFound, match="no version 7"):
        await memory.unsaved.save(memory.world.run, 7, durable)
    other = publish(memory.disk)
    with pytest.raises(Conflict, match="other weights"):
        await memory.unsaved.save(memory.world.run, 1, other)
    changed = msgspec.structs.replace(durable, files={**durable.files, "config.json": "b" * 64})
    with pytest.raises(Conflict, match="other weights"):
        await memory.unsaved.save(memory.world.run, 1, changed)
    (Path(durable.uri) / "config.json").unlink()
    with pytest.raises(WeightsRejected, match=r"has no config\.json"):
        await memory.unsaved.save(memory.world.run, 1, durable)
    assert await memory.head() == (1, False)


async def test_versions_that_this_machine_does_not_see_are_refused(memory: Memory) -> None:
    request = commit_request([await memory.claim()], 0, memory.write())
    unsaved = msgspec.structs.replace(request, is_saved=False)
    shutil.rmtree(memory.memory)
    with pytest.raises(WeightsMissing, match=r"server\.weights_memory_dir"):
        await memory.versions.commit(memory.world.run, unsaved)
    assert await memory.head() == (0, True)
    assert await memory.training() == [("leased", None)]


async def test_what_is_committed_as_saved_is_not_looked_for_in_memory(memory: Memory) -> None:
    weights = memory.write()
    request = commit_request([await memory.claim()], 0, weights)
    with pytest.raises(WeightsMissing):
        await memory.versions.commit(memory.world.run, request)
    there = memory.memory / "run_x" / Path(weights.uri).name
    in_memory = msgspec.structs.replace(request, weights=msgspec.structs.replace(weights, uri=str(there)))
    with pytest.raises(WeightsRejected, match="needs a directory on the disk"):
        await memory.versions.commit(memory.world.run, in_memory)
    outside = msgspec.structs.replace(weights, uri=f"/elsewhere/run_x/{there.name}")
    with pytest.raises(WeightsRejected, match="outside the directory for weights"):
        await memory.versions.commit(
            memory.world.run, msgspec.structs.replace(request, weights=outside, is_saved=False)
        )


async def test_damaged_weights_in_memory_are_refused(memory: Memory) -> None:
    weights = memory.write()
    file = memory.memory / "run_x" / Path(weights.uri).name / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    request = commit_request([await memory.claim()], 0, weights)
    with pytest.raises(WeightsRejected, match="SHA-256 differs"):
        await memory.versions.commit(memory.world.run, msgspec.structs.replace(request, is_saved=False))
