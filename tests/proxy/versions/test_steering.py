"""Versions pinned, rolled back and rejected by people, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.auth.service import PrincipalKind
from proxy.contract.claim import CommitReply
from proxy.contract.policy import Head, PruneReply, PruneRequest, WeightsReference
from proxy.versions.repository import VersionRepository
from tests.proxy.turns.trainer_client import TrainerClient, open_trainer, read
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, publish


class Installation:
    """A run with versions, a trainer's client and an administrator's key."""

    def __init__(self, world: World, trainer: TrainerClient, admin: dict[str, str], directory: Path) -> None:
        self.world, self.trainer = world, trainer
        self.admin = admin
        self._directory = directory

    async def commit(self, parent: int) -> WeightsReference:
        """Commit a version after `parent`, which is the head."""
        await self.world.ready(version=parent)
        batch = await self.trainer.claim()
        assert batch.claim_id is not None
        weights = publish(self._directory)
        request = commit_request([batch.claim_id], parent, weights)
        read(await self.trainer.post("/versions", request), CommitReply)
        return weights

    async def serve(self, version: int) -> None:
        """Record that the engines serve this version."""
        await self.world.database.commit(
            lambda connection: VersionRepository(connection).mark_served(
                self.world.run_id, version, swap_seconds=None, now=self.world.clock.now
            )
        )

    async def change(self, change: str, **body: Any) -> httpx.Response:
        return await self.trainer.http.post(
            f"/api/v1/runs/policy/versions/{change}", json={"reason": "worse", **body}, headers=self.admin
        )

    async def changed(self, change: str, **body: Any) -> dict[str, Any]:
        answer = await self.change(change, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def listed(self) -> dict[str, Any]:
        answer = await self.trainer.http.get("/api/v1/runs/policy/versions", headers=self.admin)
        found: dict[str, Any] = answer.json()
        return found

    async def states(self) -> list[str]:
        """Return the states of the versions, oldest first."""
        return [one["state"] for one in reversed((await self.listed())["versions"])]

    async def head(self) -> Head:
        return read(await self.trainer.http.get("/api/v1/runs/policy/head"), Head)


@pytest.fixture
async def here(world: World, tmp_path: Path) -> AsyncIterator[Installation]:
    """Three versions after the base model, of which the newest serves."""
    async with open_trainer(world) as trainer:
        installation = Installation(world, trainer, await trainer.key(PrincipalKind.ADMIN), tmp_path)
        for parent in range(3):
            await installation.commit(parent)
        await installation.serve(3)
        yield installation


async def test_a_rollback_moves_the_head_and_the_trainer_goes_on_from_there(
    here: Installation, tmp_path: Path
) -> None:
    standing = await here.changed("rollback", to=1)
    assert standing == {
        "run": "policy",
        "head": 1,
        "serving": 3,
        "wanted": 1,
        "pinned": None,
        "promoted": None,
        "rolled_back": [2, 3],
    }
    assert await here.states() == ["retired", "retired", "rolled_back", "rolled_back"]
    assert {one["rejected_because"] for one in (await here.listed())["versions"][:2]} == {"worse"}
    (event,) = await here.world.events("version.rolled_back")
    assert event.pop("by").startswith("key_")
    assert event == {"to": 1, "versions": [2, 3], "sessions_left_out": 0, "reason": "worse"}
    await here.world.ready(version=3)
    batch = await here.trainer.claim()
    assert batch.claim_id is not None
    late = await here.trainer.post("/versions", commit_request([batch.claim_id], 3, publish(tmp_path)))
    assert (late.status_code, late.json()["error"]["param"]) == (409, "parent_version")
    await here.trainer.post(f"/claims/{batch.claim_id}/release")
    await here.commit(1)
    assert (await here.head()).version == 4, "a number is never used twice"
    assert (await here.listed())["versions"][0]["parent"] == 1


async def test_a_rollback_goes_to_the_parent_of_the_served_version_by_default(here: Installation) -> None:
    await here.commit(3)
    assert (await here.changed("rollback"))["rolled_back"] == [3, 4], "version 3 serves, and is bad"
    assert (await here.head()).version == 2


async def test_sessions_of_versions_rolled_back_are_left_out_of_training_if_asked(here: Installation) -> None:
    world = here.world
    good, bad = await world.ready(version=1), await world.ready(version=3)
    still_open = await world.session()
    await world.turn(still_open, version=2)
    await here.changed("rollback", to=1, leave_out_sessions=True)
    (event,) = await world.events("version.rolled_back")
    assert event["sessions_left_out"] == 2
    await world.reward(still_open, 1.0)
    trained = {each: (await world.session_row(each)).training for each in (good, bad, still_open)}
    assert trained == {good: "ready", bad: "excluded", still_open: "excluded"}


async def test_sessions_in_a_claim_are_left_out_once_the_claim_is_released(here: Installation) -> None:
    bad = await here.world.ready(version=3)
    batch = await here.trainer.claim()
    await here.changed("rollback", to=1, leave_out_sessions=True)
    assert (await here.world.session_row(bad)).training == "leased"
    await here.trainer.post(f"/claims/{batch.claim_id}/release")
    assert (await here.world.session_row(bad)).training == "excluded"


async def test_a_pinned_version_stays_while_training_goes_on(here: Installation) -> None:
    assert (await here.changed("2/pin"))["pinned"] == 2
    await here.commit(3)
    listed = await here.listed()
    assert (listed["head"], listed["pinned"]) == (4, 2)
    (event,) = await here.world.events("version.pinned")
    assert (event["version"], event["reason"]) == (2, "worse")
    uris = [one["weights"]["uri"] for one in listed["versions"] if one["weights"] is not None]
    pruned = await here.trainer.post("/versions/prune", PruneRequest(keep=1, present=tuple(uris)))
    assert read(pruned, PruneReply).remove == (uris[-1],), "the pinned, the served and the newest stay"
    assert (await here.changed("unpin"))["pinned"] is None
    assert (await here.change("unpin")).status_code == 409


async def test_a_pin_moves_off_a_version_that_is_withdrawn(here: Installation) -> None:
    await here.changed("3/pin")
    assert (await here.changed("3/reject"))["pinned"] == 2
    await here.commit(2)
    assert (await here.listed())["pinned"] == 2
    assert (await here.changed("rollback", to=1))["pinned"] == 1
    assert (await here.changed("0/pin"))["pinned"] == 0


async def test_a_rejected_version_is_never_the_head_again(here: Installation) -> None:
    assert (await here.changed("3/reject"))["head"] == 2
    assert (await here.change("3/reject")).json()["error"]["message"] == "version 3 was rejected before"
    assert (await here.changed("2/reject"))["head"] == 1
    assert await here.states() == ["retired", "retired", "rejected", "rejected"]


@pytest.mark.parametrize(
    ("change", "body", "status", "message"),
    [
        ("9/pin", {}, 404, "the run 'policy' has no version 9; it has 0 to 3"),
        ("rollback", {"to": 9}, 404, "has no version 9"),
        ("rollback", {"to": 3}, 409, "version 3 is the newest good one: there is nothing to roll back"),
        ("0/reject", {}, 409, "version 0 is what the run began from"),
        ("1/pin", {"reason": " "}, 400, "reason"),
        ("1/pin", {"reason": "x" * 1001}, 400, "reason"),
        ("1/pin", {"why": "x"}, 400, "why"),
        ("rollback", {"to": -1}, 400, "to"),
        ("x/pin", {}, 400, "version"),
    ],
)
async def test_changes_that_cannot_be_made(
    here: Installation, change: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = await here.change(change, **body)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]
    assert await here.states() == ["retired", "retired", "retired", "serving"]


async def test_only_a_version_that_can_be_served_is_gone_back_to(here: Installation) -> None:
    await here.changed("2/reject")
    assert "was rejected: worse" in (await here.change("2/pin")).json()["error"]["message"]
    uris = [one["weights"]["uri"] for one in (await here.listed())["versions"] if one["version"] == 1]
    await here.trainer.post("/versions/prune", PruneRequest(keep=1, present=tuple(uris)))
    refused = await here.change("rollback", to=1)
    assert refused.status_code == 409
    assert refused.json()["error"]["message"].endswith("there are those of 0 and 3")
    await here.changed("rollback", to=0)
    assert "was rolled back: worse" in (await here.change("3/pin")).json()["error"]["message"]
    assert "version 0 serves" not in (await here.change("rollback")).text
    await here.serve(0)
    assert "version 0 serves, and no version is before it" in (await here.change("rollback")).text


async def test_trainers_and_agents_may_not_change_versions(here: Installation) -> None:
    for kind in (PrincipalKind.TRAINER, PrincipalKind.RUN):
        headers = await here.trainer.key(kind, run_id=here.world.run_id)
        answer = await here.trainer.http.post(
            "/api/v1/runs/policy/versions/1/pin", json={"reason": "mine"}, headers=headers
        )
        assert answer.status_code == 403
