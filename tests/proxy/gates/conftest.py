"""A run whose versions have gates, on a store without engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.contract.identifiers import SessionId
from proxy.gates.keeper import GateKeeper
from proxy.gates.service import GateService
from proxy.versions.repository import VersionRepository, wanted_version
from tests.proxy.turns.world import World, open_world
from tests.proxy.versions.publishing import fit_request, publish, versions_of

CANARY = {"policy": "gated", "canary": {"share": 0.5, "sessions": 60}}


class Gated:
    """A run with its keeper; `serve` does what the engines' controllers do."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.keeper = GateKeeper(database=world.database, runs=world.runs, signals=world.signals, clock=world.clock)
        self.gates = GateService(database=world.database, signals=world.signals, clock=world.clock)
        self._directory = directory

    async def commit(self, parent: int, **metrics: float) -> int:
        """Commit a version made from `parent`, which is the head, and return its number."""
        request = fit_request((), parent, publish(self._directory))
        step = msgspec.structs.replace(request.step, metrics={**request.step.metrics, **metrics})
        request = msgspec.structs.replace(request, step=step)
        return (await versions_of(self.world).commit(await self.world.current_run(), request)).version

    async def sessions(self, version: int, rewards: list[float], **turn: Any) -> list[SessionId]:
        """Let the version answer a session for each reward, one after the other."""
        made = []
        for reward in rewards:
            self.world.clock.now += 0.01
            session_id = await self.world.session()
            await self.world.turn(session_id, version=version, **turn)
            await self.world.reward(session_id, reward)
            made.append(session_id)
        return made

    async def tend(self) -> None:
        self.world.clock.now += 1
        await self.keeper.tend()

    async def serve(self) -> int:
        """Record that the engines serve the version that they should, and return it."""

        def mark(connection: Any) -> int:
            versions = VersionRepository(connection)
            version = wanted_version(versions.run(self.world.run_id))
            versions.mark_served(self.world.run_id, version, swap_seconds=None, now=self.world.clock())
            return version

        return await self.world.database.commit(mark)

    async def states(self) -> list[str]:
        """Return the states of the versions, oldest first."""
        run = await self.world.current_run()
        return [view.state.value for view in reversed(await versions_of(self.world).list_(run))]

    async def head(self) -> int:
        return (await self.world.current_run()).head_version

    async def finding(self, version: int, gate: str) -> Any:
        found = await self.gates.findings(await self.world.current_run(), version)
        return next((each for each in found.findings if each.gate == gate), None)

    async def configure(self, release: dict[str, Any]) -> None:
        config = {**self.world.run.settings.stored, "release": release}
        await self.world.set_run(config=config)


@pytest.fixture
async def gated(database_url: str, tmp_path: Path) -> AsyncIterator[Gated]:
    async with open_world(database_url) as world:
        here = Gated(world, tmp_path)
        await here.configure(CANARY)
        yield here


__all__ = ["CANARY", "Gated"]
