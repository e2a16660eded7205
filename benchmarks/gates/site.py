"""A run on a real store, with the real commit, keeper and routing, whose sessions are drawn instead of generated.

A version is a true mean reward. A session goes to the version that the proxy's own routing names, and gets the reward
1 with that probability, else 0. No model, engine or HTTP takes part: thousands of steps would take days with them.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from safetensors.numpy import save_file
from sqlalchemy import Connection, insert

from benchmarks.gates.commits import commit_request, reference
from benchmarks.gates.faults import Habits, drawn_call
from proxy.clock import system_clock
from proxy.contract.identifiers import new_session_id
from proxy.contract.policy import VersionState
from proxy.database.migrate import upgrade
from proxy.database.tables import SessionRow, TurnRow
from proxy.database.unit_of_work import Database
from proxy.gates.keeper import GateKeeper
from proxy.gates.service import GateService
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunDirectory, RunView
from proxy.settings import ReleaseSettings, RunSettings
from proxy.versions.inspector import WeightsInspector
from proxy.versions.release import read_tracks, track_of
from proxy.versions.repository import VersionRepository, wanted_version
from proxy.versions.service import VersionService

# The keeper looks once a second; so many sessions end between two looks.
SESSIONS_PER_LOOK = 16


class Site:
    """`answered` counts the sessions of each version, `beyond_trial` those that it answered as no canary."""

    def __init__(self, directory: Path, release: dict[str, Any], *, seed: int, mean: float) -> None:
        self._directory = directory
        self._release = release
        self.rng = random.Random(seed)
        self.means = {0: mean}
        self.usual_habits: Habits | None = None
        self.habits: dict[int, Habits] = {}
        self.answered: Counter[int] = Counter()
        self.beyond_trial: Counter[int] = Counter()
        self.evaluated = 0

    async def __aenter__(self) -> Self:
        url = f"sqlite:///{self._directory / 'store.sqlite3'}"
        upgrade(url)
        self._database = Database(url)
        self._runs = RunDirectory(self._database, system_clock)
        settings = RunSettings(
            name="policy",
            model=str(self._directory),
            weights="adapter",
            max_new_tokens=256,
            release=ReleaseSettings.model_validate(self._release),
        )
        self.run: RunView = await self._runs.ensure(settings)
        signals = Signals()
        self._inspector = WeightsInspector(self._directory)
        self._versions = VersionService(
            database=self._database, clock=system_clock, signals=signals, inspector=self._inspector
        )
        self._keeper = GateKeeper(database=self._database, runs=self._runs, signals=signals, clock=system_clock)
        self._gates = GateService(database=self._database, signals=signals, clock=system_clock)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._inspector.aclose()
        await self._database.aclose()

    async def step(self, change: float) -> int:
        """Commit a version whose true mean is that of the head plus `change`, and return its number."""
        head = (await self._runs.by_id(self.run.id)).head_version
        target = self._directory / f"weights-{len(self.means)}"
        target.mkdir()
        layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        tensors = {f"{layer}A.weight": np.ones((1, 2), np.float32), f"{layer}B.weight": np.ones((2, 1), np.float32)}
        save_file(tensors, target / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
        (target / "adapter_config.json").write_bytes(msgspec.json.encode(config))
        version = (await self._versions.commit(self.run, commit_request(head, reference(target)))).version
        self.means[version] = min(0.98, max(0.02, self.means[head] + change))
        return version

    async def sessions(self, count: int) -> None:
        """Let new sessions be answered and rewarded, with a look of the keeper after every few."""
        for start in range(0, count, SESSIONS_PER_LOOK):
            await self._answer(min(SESSIONS_PER_LOOK, count - start))
            await self.look()

    async def look(self) -> None:
        """Let the keeper look, and the engines follow."""
        await self._keeper.tend()
        if await self._database.read(self._is_behind):
            await self._database.commit(self._serve)

    async def state(self, version: int) -> VersionState:
        return next(view.state for view in await self._versions.list_(self.run) if view.version == version)

    async def serving(self) -> int:
        return (await self._runs.by_id(self.run.id)).serving_version

    async def evaluate(self, version: int, mean: float, tasks: int, suite: str) -> None:
        """Post results of a version at a suite: it solves the easiest tasks, up to a share of `mean`, and one task in
        ten comes out the other way."""
        results = []
        for task in range(tasks):
            is_solved = (task + 0.5) / tasks < mean
            is_flipped = self.rng.random() < 0.1
            reward = float(is_solved != is_flipped)
            results.append({"task": f"t{task}", "attempt": 0, "reward": reward, "session_id": None})
        self.evaluated += tasks
        await self._gates.add_results(self.run, version, suite, results)

    async def finding(self, version: int, gate: str) -> dict[str, Any]:
        found = await self._gates.findings(self.run, version)
        return next(each.evidence for each in found.findings if each.gate == gate)

    async def _answer(self, count: int) -> None:
        def answer(connection: Connection) -> list[tuple[int, bool]]:
            serving = VersionRepository(connection).run(self.run.id).serving_version
            tracks = read_tracks(connection, [self.run]).get(self.run.id, ())
            made = []
            for _ in range(count):
                session_id = new_session_id()
                track = track_of(tracks, session_id, None)
                version = serving if track is None else track.version
                now = system_clock()
                connection.execute(insert(SessionRow).values(**self._row(session_id, version, now)))
                if (habits := self.habits.get(version, self.usual_habits)) is not None:
                    call = drawn_call(habits, self.rng, run_id=self.run.id, session_id=session_id, now=now)
                    connection.execute(insert(TurnRow).values(**call))
                made.append((version, track is not None))
            return made

        for version, is_trial in await self._database.commit(answer):
            self.answered[version] += 1
            if not is_trial:
                self.beyond_trial[version] += 1

    def _row(self, session_id: str, version: int, now: float) -> dict[str, Any]:
        return {
            "id": session_id,
            "run_id": self.run.id,
            "purpose": "train",
            "attributed_by": "created",
            "state": "ended",
            "training": "ready",
            "turn_count": 1,
            "reward": float(self.rng.random() < self.means[version]),
            "oldest_version": version,
            "newest_version": version,
            "created_at": now,
            "last_active_at": now,
            "ended_at": now,
            "ready_at": now,
        }

    def _is_behind(self, connection: Connection) -> bool:
        run = VersionRepository(connection).run(self.run.id)
        return wanted_version(run) != int(run.serving_version)

    def _serve(self, connection: Connection) -> None:
        versions = VersionRepository(connection)
        run = versions.run(self.run.id)
        if (version := wanted_version(run)) != run.serving_version:
            versions.mark_served(self.run.id, version, swap_seconds=None, now=system_clock())
