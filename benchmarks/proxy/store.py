"""A store with many runs and versions, to measure the cost of runs that nobody calls."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, update

from proxy.clock import system_clock
from proxy.contract.claim import CommitRequest, StepReport
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import WeightsFormat, WeightsReference
from proxy.database.migrate import upgrade
from proxy.database.tables import RunRow
from proxy.database.unit_of_work import Database
from proxy.runs.service import RunDirectory, RunView
from proxy.settings import RunSettings
from proxy.versions.repository import VersionRepository

VERSIONS = 10
"""Versions of every run."""


def fill(file: Path, runs: int, model: str) -> None:
    """Make a store in a new file with this many active runs, each with `VERSIONS` versions of which the last one
    serves."""
    file.parent.mkdir(parents=True, exist_ok=True)
    url = f"sqlite:///{file.resolve()}"
    upgrade(url)
    # On a thread: the caller may be in an event loop already.
    with ThreadPoolExecutor(1) as worker:
        worker.submit(lambda: asyncio.run(_fill(url, runs, model))).result()


async def _fill(url: str, runs: int, model: str) -> None:
    database = Database(url, synchronous="normal")
    directory = RunDirectory(database, system_clock)
    for number in range(runs):
        run = await directory.ensure(RunSettings(name=f"other-{number}", model=model))
        await database.commit(partial(_add_versions, run))
    await database.aclose()


def _add_versions(run: RunView, connection: Connection) -> None:
    repository = VersionRepository(connection)
    for version in range(1, VERSIONS + 1):
        weights = WeightsReference(
            uri=f"/nowhere/{run.name}/{version}",
            format=WeightsFormat.HUGGINGFACE,
            sha256=f"{version:064}",
            bytes=1 << 20,
        )
        step = StepReport(config_hash="0" * 64, seed=version, metrics={"loss": 0.5, "reward_mean": 0.5}, audit=())
        request = CommitRequest(
            claim_ids=(ClaimId(f"{run.name}-{version}"),), parent_version=version - 1, weights=weights, step=step
        )
        repository.insert_version(run.id, version, request, now=system_clock())
    repository.mark_served(run.id, VERSIONS, swap_seconds=0.01, now=system_clock())
    connection.execute(update(RunRow).where(RunRow.id == run.id).values(head_version=VERSIONS))
