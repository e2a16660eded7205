"""The health view: database, engine, disk and trainers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.states import RunState
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.engines.faults import EngineFault, EngineFaults
from proxy.errors import StoreDamaged, StoreUnavailable
from proxy.lifecycle.drift import WINDOW, drift_of
from proxy.overview.repository import OverviewRepository
from proxy.overview.steps.repository import StepOverviewRepository
from proxy.overview.views import EngineView, Health, RunHealth
from proxy.runs.asking import AskedBatches
from proxy.runs.repository import RunRepository
from proxy.settings import RunSettings

# Below this, the next weights or a busy hour may fill the disk.
_LOW_DISK_BYTES = 1 << 30


class ServingStatus(Protocol):
    """The part of the pool of engines that the health view needs."""

    @property
    def ready(self) -> bool:
        """Whether at least one run is served."""
        ...

    def views(self) -> tuple[EngineView, ...]:
        """Return every engine with what it serves."""
        ...

    def problems(self) -> list[str]:
        """Return a line for everything that keeps a run from being served."""
        ...


class HealthCheck:
    """Checks database, engine, disk and trainers.

    `engines` is None if no engine is watched, `data_dir` if no disk is. `serves_unrecorded`: model calls are also
    served while the store is unavailable (`database.when_unavailable = "serve"`).
    """

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        engines: ServingStatus | None,
        data_dir: Path | None,
        faults: EngineFaults | None = None,
        asked: AskedBatches | None = None,
        serves_unrecorded: bool = False,
    ) -> None:
        self._database = database
        self._clock = clock
        self._engines = engines
        self._data_dir = data_dir
        self._faults = faults
        self._asked = asked or AskedBatches()
        self._serves_unrecorded = serves_unrecorded

    async def check(self) -> Health:
        """Return the health view. Never raise: the view lists what does not work."""
        problems: list[str] = []
        began = time.monotonic()
        runs: tuple[RunHealth, ...] = ()
        database = "down"
        seconds: float | None = None
        try:
            runs = await self._run_health()
            seconds = time.monotonic() - began
            database = "unwritable"
            await self._database.check_writable()
            database = "ok"
        except StoreUnavailable as error:
            if isinstance(error, StoreDamaged):
                database = "damaged"
            problems.append(error.message)
        engine_ready = self._engines.ready if self._engines is not None else None
        problems.extend(self._engines.problems() if self._engines is not None else ())
        problems.extend(_fault_problem(fault) for fault in (self._faults.recent() if self._faults else ()))
        disk = _disk(self._data_dir)
        if disk is not None and disk[1] < _LOW_DISK_BYTES:
            problems.append(f"only {disk[1] / 2**20:.0f} MiB are free on the disk of {self._data_dir}")
        problems.extend(_run_problems(runs))
        return Health(
            ready=(database == "ok" or self._serves_unrecorded) and engine_ready is not False,
            status="degraded" if problems else "ok",
            problems=tuple(problems),
            database=database,
            database_seconds=time.monotonic() - began if seconds is None else seconds,
            database_integrity=integrity.value if (integrity := self._database.integrity) is not None else None,
            engine_ready=engine_ready,
            disk_free_bytes=disk[1] if disk is not None else None,
            disk_total_bytes=disk[0] if disk is not None else None,
            runs=runs,
            now=self._clock(),
            engines=self._engines.views() if self._engines is not None else (),
        )

    async def _run_health(self) -> tuple[RunHealth, ...]:
        def read(connection: Connection) -> tuple[RunHealth, ...]:
            return tuple(self._health_of(run, connection) for run in RunRepository(connection).all_by_age())

        return await self._database.read(read)

    def _health_of(self, run: AnyRow, connection: Connection) -> RunHealth:
        repository, steps = OverviewRepository(connection), StepOverviewRepository(connection)
        now = self._clock()
        settings = RunSettings.model_validate(run.config)
        lease = settings.lease_seconds
        mark = repository.trainer_marks(run.id)
        # Claims and renewals set the expiry to `lease` seconds after the request, which gives the request's time.
        seen_at = max(mark.created_at, mark.lease_expires_at - lease) if mark is not None else None
        # A trainer that waits for its first batch has no claim; only its request is known.
        if (asked := self._asked.find(run.id)) is not None:
            seen_at = max(seen_at or asked.at, asked.at)
        ready_since = repository.oldest_ready(run.id)
        is_awaited = ready_since is not None and now - ready_since > lease and run.state == RunState.ACTIVE
        if seen_at is not None and now - seen_at <= lease:
            trainer = "active"
        elif is_awaited:
            trainer = "away"
        else:
            trainer = "idle" if seen_at is not None else "never"
        rejected = steps.rejected_beyond(run.id, run.head_version)
        taken_back = steps.taken_back_beyond(run.id, run.head_version)
        return RunHealth(
            id=run.id,
            name=run.name,
            state=run.state,
            head_version=run.head_version,
            serving_version=run.serving_version,
            trainer=trainer,
            trainer_seen_at=seen_at,
            paused_because=repository.pause_reason(run.id) if run.state == RunState.PAUSED else None,
            rejected_version=None if rejected is None else rejected.version,
            rejected_because=None if rejected is None else rejected.rejected_because,
            taken_back_version=None if taken_back is None else taken_back.version,
            taken_back_because=None if taken_back is None else taken_back.text,
            mismatch=steps.mismatch(run.id, run.head_version),
            drifted_judges={
                judge: drift
                for judge in settings.judges
                if (drift := drift_of(repository.judge_scores(run.id, judge, limit=2 * WINDOW))) is not None
            },
        )


def _run_problems(runs: Sequence[RunHealth]) -> Iterator[str]:
    for run in runs:
        if run.state == RunState.ARCHIVED:
            continue  # nobody waits for it, so nothing about it needs attention
        if run.trainer == "away":
            yield f"trajectories of the run {run.name!r} are ready, but no trainer asks for them"
        if run.paused_because is not None:
            yield f"the run {run.name!r} is paused: {run.paused_because}"
        if run.rejected_version is not None:
            yield (
                f"version {run.rejected_version} of the run {run.name!r} was rejected and is not served:"
                f" {run.rejected_because}. Version {run.serving_version} serves, and the trainer continues from"
                f" version {run.head_version}"
            )
        if run.taken_back_version is not None:
            yield (
                f"the run {run.name!r} was rolled back from version {run.taken_back_version} to {run.head_version}:"
                f" {run.taken_back_because}"
            )
        for judge, drift in run.drifted_judges.items():
            yield f"the judge {judge!r} of the run {run.name!r} has drifted: {drift}"
        if run.mismatch is not None:
            yield _mismatch_problem(run, run.mismatch)


def _mismatch_problem(run: RunHealth, gap: float) -> str:
    return (
        f"engine and trainer of the run {run.name!r} disagree by {gap:.2g} nats per token of the same version, as of"
        f" version {run.head_version}: check that the engine serves the weights it reports, and its precision and"
        " quantisation (trainer.mismatch has the bounds)"
    )


def _fault_problem(fault: EngineFault) -> str:
    times = "an invalid reply" if fault.count == 1 else f"{fault.count} invalid replies"
    return f"the engine {fault.engine} sent {times}, which are never trained; the last: {fault.reason}"


def _disk(directory: Path | None) -> tuple[int, int] | None:
    """Return (total, free) bytes; None without a directory, or if its disk cannot be asked."""
    if directory is None:
        return None
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return None
    return usage.total, usage.free
