"""Two versions compared: steps, sessions, tasks and figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import update

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import SessionId
from proxy.contract.turn import FinishReason
from proxy.database.tables import SessionRow
from proxy.errors import InvalidRequest, NotFound
from proxy.overview.versions.service import VersionComparison
from proxy.overview.versions.views import VersionDiff
from proxy.versions.steering import Decision
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import audit, commit_request, publish, steering_of, versions_of


async def session(world: World, reward: float, version: int, **columns: Any) -> SessionId:
    """Create a session with one turn of this version and a reward."""
    session_id = await world.ready(reward, version=version)
    if columns:
        change = update(SessionRow).where(SessionRow.id == session_id).values(columns)
        await world.database.commit(lambda connection: connection.execute(change))
    return session_id


async def step(world: World, directory: Path, parent: int, **advantages: tuple[float, int]) -> None:
    """Commit a version after `parent` whose step trained sessions with these advantages and numbers of tokens."""
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    if not advantages:
        await world.ready(version=parent)
    batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=1, max_staleness=100))
    assert batch.claim_id is not None
    entries = tuple(
        msgspec.structs.replace(audit(1.0), session_id=SessionId(name), advantage=advantage, trained_tokens=tokens)
        for name, (advantage, tokens) in advantages.items()
    )
    request = commit_request([batch.claim_id], parent, publish(directory))
    request = msgspec.structs.replace(request, step=msgspec.structs.replace(request.step, audit=entries))
    await versions_of(world).commit(world.run, request)


async def compare(world: World, before: int, after: int, limit: int = 10) -> VersionDiff:
    return await VersionComparison(world.database).compare(world.run_id, "policy", before, after, limit=limit)


async def test_the_sessions_that_moved_the_policy_most_come_first(world: World, tmp_path: Path) -> None:
    liked, disliked, faint = [await session(world, 1.0, 0, task="sums", external_id=name) for name in "abc"]
    await step(world, tmp_path, 0, **{liked: (0.5, 10), disliked: (-2.0, 7), faint: (0.0, 100)})
    later = await session(world, 1.0, 1)
    await step(world, tmp_path, 1, **{later: (1.0, 1), "ses_broken": (math.nan, 5)})
    found = await compare(world, 0, 2)
    assert [one.version for one in found.steps] == [1, 2]
    assert found.trained_sessions == 5
    assert [(one.session_id, one.version, one.pull) for one in found.movers] == [
        (disliked, 1, -14.0),
        (liked, 1, 5.0),
        (later, 2, 1.0),
    ]
    assert [one.share for one in found.movers] == [14 / 20, 5 / 20, 1 / 20]
    assert (found.movers[0].task, found.movers[0].name, found.movers[2].task) == ("sums", "b", None)
    assert [one.session_id for one in (await compare(world, 1, 2)).movers] == [later]
    assert len((await compare(world, 0, 2, limit=1)).movers) == 1


async def test_tasks_are_better_or_worse_by_their_mean_reward(world: World, tmp_path: Path) -> None:
    await step(world, tmp_path, 0)
    rewards: dict[int, dict[str, list[float]]] = {
        0: {"up": [0, 0], "down": [1, 1, 1], "same": [0.5], "gone": [1]},
        1: {"up": [1, 0], "down": [0], "same": [0.5], "new": [1]},
    }
    for version, tasks in rewards.items():
        for task, values in tasks.items():
            for value in values:
                await session(world, value, version, task=task)
    found = await compare(world, 0, 1)
    (better,), (worse,) = found.better, found.worse
    assert (better.task, better.before, better.after) == ("up", 0.0, 0.5)
    assert (better.sessions_before, better.sessions_after) == (2, 2)
    assert (worse.task, worse.before, worse.after) == ("down", 1.0, 0.0)
    assert (worse.sessions_before, worse.sessions_after) == (3, 1)


async def test_figures_count_the_sessions_that_one_version_alone_answered(world: World, tmp_path: Path) -> None:
    await step(world, tmp_path, 0)
    await session(world, 1.0, 1)
    await session(world, 0.0, 1, outcome="failed")
    mixed = await world.session()
    for version in (0, 1):
        await world.turn(mixed, version=version)
    await world.reward(mixed, 50.0)
    cut = await world.session()
    await world.turn(cut, version=1, finish_reason=FinishReason.LENGTH)
    await world.turn(cut, version=1)
    after = (await compare(world, 0, 1)).after
    assert (after.version, after.sessions, after.rewarded, after.reward_mean) == (1, 3, 2, 0.5)
    assert after.failed_share == pytest.approx(1 / 3)
    assert after.calls_per_session == pytest.approx(4 / 3)
    assert after.cut_share == pytest.approx(1 / 4)
    assert after.call_seconds is not None
    await step(world, tmp_path, 1)
    unused = (await compare(world, 1, 2)).after
    assert (unused.version, unused.sessions, unused.reward_mean, unused.cut_share) == (2, 0, None, None)


async def test_only_a_version_and_one_that_was_made_from_it_are_compared(world: World, tmp_path: Path) -> None:
    for parent in range(2):
        await step(world, tmp_path, parent)
    decision = Decision(reason="worse", by="key_1")
    await steering_of(world).roll_back(world.run, 1, decision, leave_out_sessions=False)
    await step(world, tmp_path, 1)
    assert [one.version for one in (await compare(world, 0, 3)).steps] == [1, 3], "2 was rolled back"
    with pytest.raises(InvalidRequest, match="version 3 was not made from version 2, but from 1"):
        await compare(world, 2, 3)
    with pytest.raises(InvalidRequest, match="the earlier version first"):
        await compare(world, 1, 1)
    with pytest.raises(NotFound, match="has no version 9"):
        await compare(world, 1, 9)
