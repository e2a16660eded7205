"""Gates on real learning: the embedded engine, the proxy, the trainer and the calculator's agent. From one moment on,
the trainer learns to avoid what is rewarded. Rewards stay true, so canary and watch see what it breaks.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.gates import poison
from benchmarks.runs.agents import RunAgents
from benchmarks.runs.installation import CHECKPOINT
from proxy.cli.operations import Operations
from proxy.cli.stack import running_stack, wait_until_ready
from proxy.contract.policy import VersionState
from proxy.settings import load_settings

# The agents' rule of rewards, which the run is named after: right, and by the tool.
_RUN = "solves"
_MOST_SESSIONS = 100_000

_CONFIGURATION = """\
[run]
name = "{run}"
model = "{model}"
weights = "adapter"
max_new_tokens = 64
session_idle_seconds = 120
group_timeout_seconds = 20

[run.release]
{release}

[trainer]
threads = 1

[trainer.batch]
trajectories = 64
at_least = 32
wait_seconds = 20
max_staleness = 4

[trainer.algorithm]
preset = "grpo"
advantage = "{advantage}"

[trainer.optimizer]
learning_rate = 1e-3
"""

# A candidate has to show in 150 canary sessions that it has not lost 0.2.
MAX_DROP = 0.2
GATED = f"""\
policy = "gated"
train_from = "passed"
canary.share = 0.5
canary.sessions = 150
canary.max_drop = {MAX_DROP}
canary.undecided = "reject"
"""
# Few predecessors, because those from before the run had learnt say little about a fall.
IMMEDIATE = """\
policy = "immediate"
rollback.max_drop = 0.1
rollback.predecessors = 6
"""
# The least reward of the run after the poison, below that of before: three standard errors of 128 sessions.
_TOLERANCE = 0.1
# Sessions for training after the rollback and the end of the poison.
_AFTERWARDS = 192
_BAD = (VersionState.REJECTED, VersionState.ROLLED_BACK)


class Learning:
    """A run that learns on a real stack. `rounds` are (sessions so far, mean reward of the last 128)."""

    def __init__(self, operations: Operations, agents: RunAgents, flag: Path) -> None:
        self.operations = operations
        self.agents = agents
        self._flag = flag
        self._poisoned_at: list[float] = []
        self.rounds: list[tuple[int, float]] = []

    async def attempt(self, sessions: int = 64) -> None:
        await self.agents.train(sessions)
        self.rounds.append((self.agents.sessions, round(self.agents.reward, 3)))
        print(f"  {self.agents.sessions} sessions, reward {self.agents.reward:.2f}", flush=True)

    async def reward(self) -> float:
        """Return the mean reward of sessions that are not trained."""
        return (await self.agents.evaluate(128))[_RUN]

    def poison(self) -> None:
        """Let the trainer learn from negated rewards from its next step on."""
        self._flag.touch()

    def cure(self) -> None:
        """Let the trainer learn from the rewards as they are again, as somebody does after the alarm."""
        self._note_poisoned_steps()
        self._flag.unlink(missing_ok=True)

    async def versions(self) -> list[dict[str, Any]]:
        """Return the versions, oldest first."""
        return list(reversed((await self.operations.versions(_RUN))["versions"]))

    def poisoned(self, versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the versions that poisoned steps made. `versions` are all of them, oldest first: the trainer makes
        one after the other, so a step belongs to the first version that was committed after it."""
        self._note_poisoned_steps()
        return [
            version
            for before, version in pairwise(versions)
            if any(before["created_at"] < at <= version["created_at"] for at in self._poisoned_at)
        ]

    def _note_poisoned_steps(self) -> None:
        if self._flag.exists():
            self._poisoned_at = [float(line) for line in self._flag.read_text().split()]

    async def rewards(self) -> dict[int, list[float]]:
        """Return the rewards of the training sessions that one version alone answered, by version."""
        found: dict[int, list[float]] = defaultdict(list)
        sessions, _ = await self.operations.sessions(_RUN, {}, _MOST_SESSIONS)
        for session in sessions:
            version, reward = session["newest_version"], session["reward"]
            if session["purpose"] == "train" and version == session["oldest_version"] and reward is not None:
                found[version].append(reward)
        return found

    async def report(self, before: float, good: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what happened to the `good` versions from before the poison and to those after it."""
        rewards = await self.rewards()
        poisoned = [
            {
                "version": each["version"],
                "state": each["state"],
                "served": each["served_at"] is not None,
                "sessions": len(rewards[each["version"]]),
                "reward": round(fmean(rewards[each["version"]]), 3) if rewards[each["version"]] else None,
            }
            for each in self.poisoned(await self.versions())
        ]
        after = await self.reward()
        return {
            "healthy_versions": len(good) - 1,
            "healthy_undecided": sum(_is_undecided(each) for each in good),
            "withdrawn_by_error": sum(each["state"] in _BAD and not _is_undecided(each) for each in good),
            "reward_before": before,
            "reward_after": after,
            "recovered": after >= before - _TOLERANCE,
            "poisoned": poisoned,
            "rewards": self.rounds,
        }


async def gated(seed: int, *, healthy: int, poisoned: int) -> dict[str, Any]:
    """Learn under gates for `healthy` sessions, then poison the trainer for `poisoned` sessions.

    `harmful_served` counts the poisoned versions that were promoted and have lost more than the canary allows.
    """
    async with _learning(GATED, seed) as run:
        while run.agents.sessions < healthy:
            await run.attempt()
        before, good = await run.reward(), await run.versions()
        run.poison()
        while run.agents.sessions < healthy + poisoned:
            await run.attempt()
        found = await run.report(before, good)
        harmful = [
            each
            for each in found["poisoned"]
            if each["served"] and each["reward"] is not None and each["reward"] < before - MAX_DROP
        ]
        refused = [each["sessions"] for each in found["poisoned"] if each["state"] == VersionState.REJECTED]
        return {**found, "harmful_served": len(harmful), "canary_sessions": refused}


async def immediate(seed: int, *, healthy: int, most: int) -> dict[str, Any]:
    """Learn with automatic rollback for `healthy` sessions, then poison the trainer until the run is rolled back, or
    for `most` sessions. `sessions_to_rollback` are those that poisoned versions answered."""
    async with _learning(IMMEDIATE, seed) as run:
        while run.agents.sessions < healthy:
            await run.attempt()
        before, good = await run.reward(), await run.versions()
        run.poison()
        while run.agents.sessions < healthy + most:
            await run.attempt(32)
            if any(each["state"] == VersionState.ROLLED_BACK for each in run.poisoned(await run.versions())):
                break
        # A poisoned step that began after the rollback may still be committed; the run goes on from it and recovers.
        run.cure()
        await run.attempt(_AFTERWARDS)
        found = await run.report(before, good)
        return {**found, "sessions_to_rollback": sum(each["sessions"] for each in found["poisoned"])}


def _is_undecided(version: dict[str, Any]) -> bool:
    """Return whether a version was refused because its canary could not tell, as `canary.undecided` says."""
    return "(canary.undecided)" in (version["rejected_because"] or "")


@asynccontextmanager
async def _learning(release: str, seed: int) -> AsyncIterator[Learning]:
    """Start the stack with its trainer, and yield the run."""
    with tempfile.TemporaryDirectory(prefix="bench-gate-real-") as name:
        directory = Path(name).resolve()
        config, flag = directory / "run.toml", directory / "poison"
        text = _CONFIGURATION.format(
            run=_RUN, model=CHECKPOINT, release=release, advantage=f"{poison.__file__}:advantage"
        )
        config.write_text(text)
        os.environ[poison.FLAG] = str(flag)
        settings = load_settings(config, {"server": {"port": 0, "data_dir": directory / "data"}})
        async with running_stack(
            settings, config_file=config, with_trainer=True, seed=seed, listener=_print_event
        ) as stack:
            await wait_until_ready(stack)
            async with Operations(stack.url, stack.keys.admin_key) as operations:
                agents = RunAgents(stack.url, stack.keys.run_key, _RUN, seed=seed, concurrency=64)
                try:
                    yield Learning(operations, agents, flag)
                finally:
                    await agents.aclose()


def _print_event(part: str, event: str) -> None:
    print(f"  {part}: {event}", flush=True)
