"""Runs that are deleted with everything that belongs to them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, inspect, select

from proxy.auth.service import Credentials, PrincipalKind
from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import ClaimId
from proxy.database.tables import USED_LIMITS, Base, EventRow, RunRow
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.lifecycle.check import check
from proxy.limits.service import Limits
from proxy.limits.subjects import Scope, Subject
from proxy.runs.deletion import RunDeletion, remove_weights
from proxy.runs.service import RunDirectory, RunView
from proxy.runs.switch import RunSwitch
from proxy.settings import RunSettings, UsageLimits
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, publish, versions_of

_ROOT = Path(__file__).parents[3]

# Deletes the run and dies of SIGKILL in one of its steps.
_DYING = """
import asyncio, os, signal, sys
from pathlib import Path
from proxy.database.unit_of_work import Database
from proxy.clock import system_clock
from proxy.lifecycle.signals import Signals
from proxy.runs import deletion

url, weights_dir, step = sys.argv[1:]

def die(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)

if step == "weights":
    deletion.remove_weights = die
else:
    setattr(deletion.DeletionRepository, step, die)

async def main():
    service = deletion.RunDeletion(
        database=Database(url), signals=Signals(), clock=system_clock, weights_dir=Path(weights_dir)
    )
    await service.delete("policy", confirm="policy", is_served=False)

asyncio.run(main())
"""


class Killed(BaseException):
    """Stands for the death of the process."""


class DyingDatabase:
    """A database whose process dies before the commit number `commits`."""

    def __init__(self, database: Database, commits: int) -> None:
        self._database = database
        self._left = commits

    async def commit(self, work: Callable[[Connection], Any]) -> Any:
        if self._left == 0:
            raise Killed
        self._left -= 1
        return await self._database.commit(work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


def deletion_of(world: World, weights: Path, database: Any = None) -> RunDeletion:
    return RunDeletion(
        database=database or world.database, signals=world.signals, clock=world.clock, weights_dir=weights
    )


async def fill(world: World, weights: Path) -> list[Path]:
    """Give the run sessions, rewards, claims and two versions, and archive it. Return the versions' directories."""
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    made = []
    for parent in range(2):
        await world.ready(version=parent)
        batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=1))
        published = publish(weights / world.run.id)
        await versions_of(world).commit(world.run, commit_request([ClaimId(str(batch.claim_id))], parent, published))
        made.append(Path(published.uri))
    session = await world.session(group=await world.group(size=2))
    first = await world.turn(session, conversation="a", prompt_ids=[1], output_ids=[2])
    second = await world.turn(
        session, parent=first, prefix_tokens=2, prompt_ids=[3], output_ids=[4], conversation="b"
    )
    await world.reward(session, 1.0, turn_id=second.turn.id)
    for about in (None, second.turn.id):
        await world.text(session, "words", turn_id=about)
    await RunSwitch(world.database, world.signals, world.clock).archive("policy")
    return made


async def other_run(world: World) -> RunView:
    return await world.runs.ensure(RunSettings(name="other", model="base/model"))


async def rows_of(world: World, run_id: str) -> dict[str, int]:
    """Return the number of rows of each table that belong to the run."""
    tables = [table for table in Base.metadata.sorted_tables if "run_id" in table.columns]

    def count(connection: Connection) -> dict[str, int]:
        found = {
            table.name: int(
                connection.execute(
                    select(func.count()).select_from(table).where(table.columns.run_id == run_id)
                ).scalar_one()
            )
            for table in tables
        }
        return {name: number for name, number in found.items() if number}

    return await world.database.read(count)


async def indexes(world: World) -> list[str]:
    def read(connection: Connection) -> list[str]:
        return [str(each["name"]) for each in inspect(connection).get_indexes("turns")]

    return [name for name in await world.database.read(read) if "deletion" in name]


async def use_limits(world: World, run: RunView, other: RunView) -> None:
    """Use limits of a run, of a key of it, and of another run."""
    key = await Credentials(world.database, b"s" * 32, world.clock).create(PrincipalKind.RUN, run_id=run.id)
    limits = Limits(world.database, world.clock)
    bounds = UsageLimits(calls_per_minute=6, tokens_per_day=10)
    for scope, subject_id in ((Scope.RUN, run.id), (Scope.KEY, key.id), (Scope.RUN, other.id)):
        subject = Subject(scope=scope, id=subject_id, name="used", limits=bounds)
        await limits.begin_call(run, [subject])
    await limits.aclose()


async def test_nothing_of_a_deleted_run_is_left(world: World, database_url: str, tmp_path: Path) -> None:
    other = await other_run(world)
    directories = await fill(world, tmp_path)
    (tmp_path / other.id).mkdir()
    await use_limits(world, world.run, other)
    others_before = await rows_of(world, other.id)
    assert {"sessions", "turns", "rewards", "claims", "policy_versions", "groups"} <= set(
        await rows_of(world, world.run.id)
    )
    heard: list[str] = []
    world.signals.erasures.listen(heard.extend)
    assert await deletion_of(world, tmp_path).delete("policy", confirm="policy", is_served=False)
    assert await rows_of(world, world.run.id) == {}
    assert await rows_of(world, other.id) == others_before
    for used in USED_LIMITS:
        assert [row.subject_id for row in await world.rows(used)] == [other.id]
    assert len(heard) == 3
    assert [run.name for run in await world.runs.list_()] == ["other"]
    assert not any(directory.exists() for directory in directories)
    assert [path.name for path in tmp_path.glob("run_*")] == [other.id]
    (tombstone,) = [row for row in await world.rows(EventRow) if row.kind == "run.deleted"]
    assert tombstone.data.items() >= {"id": world.run.id, "name": "policy", "sessions": 3, "versions": 2}.items()
    assert tombstone.data["turns"] > 2
    assert tombstone.data["bytes"] > 0
    assert check(database_url) == []
    again = await world.runs.ensure(RunSettings(name="policy", model="another/model"))
    assert again.id != world.run.id


async def test_a_deletion_that_dies_before_any_of_its_commits_is_finished_later(
    world: World, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.runs.deletion._INDEXED_FROM", 1)  # or this small run would not need the indexes
    directories = await fill(world, tmp_path)
    with pytest.raises(Killed):
        await deletion_of(world, tmp_path, DyingDatabase(world.database, 0)).delete(
            "policy", confirm="policy", is_served=False
        )
    assert all(directory.exists() for directory in directories)
    for commits in range(1, 40):
        dying = deletion_of(world, tmp_path, DyingDatabase(world.database, commits))
        if await dying.delete("policy", confirm="policy", is_served=False):
            break
        with pytest.raises(NotFound):
            await world.runs.by_name_or_id(world.run.id)
        assert check(database_url) == []
        await deletion_of(world, tmp_path).finish_all()
        assert await rows_of(world, world.run.id) == {}
        assert not any(directory.exists() for directory in directories)
        assert await indexes(world) == []
        world.run = await world.runs.ensure(RunSettings(name="policy", model="base/model"))
        directories = await fill(world, tmp_path)
    assert 6 < commits < 39
    assert len(await world.events("run.deleted")) == commits


@pytest.mark.parametrize("step", ["delete_sessions", "delete_some", "weights", "delete_rest"])
async def test_a_process_that_is_killed_leaves_the_rest_to_the_next_one(
    world: World, database_url: str, tmp_path: Path, step: str
) -> None:
    directories = await fill(world, tmp_path)
    command = [sys.executable, "-c", _DYING, database_url, str(tmp_path), step]
    process = await asyncio.create_subprocess_exec(*command, cwd=_ROOT)
    assert await asyncio.wait_for(process.wait(), 120) == -signal.SIGKILL
    assert [run.name for run in await world.runs.list_()] == []
    assert check(database_url) == []
    await deletion_of(world, tmp_path).finish_all()
    assert await rows_of(world, world.run.id) == {}
    assert not any(directory.exists() for directory in directories)
    assert len(await world.events("run.deleted")) == 1


async def test_a_run_that_somebody_needs_is_not_deleted(world: World, tmp_path: Path) -> None:
    deletion = deletion_of(world, tmp_path)
    with pytest.raises(NotFound):
        await deletion.delete("ghost", confirm="ghost", is_served=False)
    with pytest.raises(Conflict, match="an engine serves the run"):
        await deletion.delete("policy", confirm="policy", is_served=True)
    await world.ready()
    with pytest.raises(Conflict, match="archive it first"):
        await deletion.delete("policy", confirm="policy", is_served=False)
    await RunSwitch(world.database, world.signals, world.clock).archive("policy")
    with pytest.raises(InvalidRequest, match=r"1 sessions, 1 turns and 0 versions .* \?confirm=policy"):
        await deletion.delete("policy", confirm="other", is_served=False)
    declared = {"name": "next", "model": "base/model", "from": "policy@0"}
    await RunDirectory(world.database, world.clock).ensure(RunSettings.model_validate(declared))
    with pytest.raises(Conflict, match=r"begin from versions of 'policy' .* next \(from version 0\)"):
        await deletion.delete("policy", confirm="policy", is_served=False)
    assert await deletion.delete("next", confirm=None, is_served=False)
    assert await deletion.delete("policy", confirm="policy", is_served=False)
    assert await world.rows(RunRow) == []


async def test_a_run_that_trains_is_not_deleted(world: World, tmp_path: Path) -> None:
    deletion = deletion_of(world, tmp_path)
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    await world.ready()
    batch = await claims.claim(world.run, ClaimRequest(trainer="t", want=1))
    assert batch.claim_id is not None
    await RunSwitch(world.database, world.signals, world.clock).archive("policy")
    with pytest.raises(Conflict, match="a trainer works on trajectories of the run 'policy': stop it"):
        await deletion.delete("policy", confirm="policy", is_served=False)
    await claims.release(world.run, batch.claim_id)
    assert await deletion.delete("policy", confirm="policy", is_served=False)


async def test_a_turn_that_comes_after_the_deletion_is_not_recorded(world: World, tmp_path: Path) -> None:
    session = await world.session()
    await world.ready()
    await RunSwitch(world.database, world.signals, world.clock).archive("policy")
    assert await deletion_of(world, tmp_path).delete("policy", confirm="policy", is_served=False)
    with pytest.raises(NotFound):
        await world.turn(session)


async def test_weights_that_cannot_be_removed_are_tried_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = await fill(world, tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr("proxy.runs.deletion.remove_weights", refuse)
        assert not await deletion_of(world, tmp_path).delete("policy", confirm="policy", is_served=False)
    assert [run.name for run in await world.runs.list_()] == []
    await deletion_of(world, tmp_path).finish_all()
    assert not any(directory.exists() for directory in directories)
    assert await world.rows(RunRow) == []


def refuse(*_: object) -> None:
    raise PermissionError("the storage refuses")


def test_only_what_is_below_the_directory_for_weights_is_removed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "weights", tmp_path / "elsewhere"
    for directory in (root / "run_1" / "v1", root / "run_2", root / "own" / "v2", elsewhere):
        directory.mkdir(parents=True)
    (root / "link").symlink_to(elsewhere)
    uris = [str(root / "run_1" / "v1"), str(root / "own" / "v2"), str(elsewhere), str(root), str(root / "link")]
    for _ in range(2):
        remove_weights(root, "run_1", uris)
        assert sorted(path.name for path in root.iterdir()) == ["link", "own", "run_2"]
        assert elsewhere.is_dir()
        assert not any((root / "own").iterdir())
