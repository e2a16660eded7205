"""The kinds of jobs that this version can run, built from the services that their handlers need.

A proxy and a `base-rl worker` register the same kinds.
"""

from __future__ import annotations

from typing import Any

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.errors import NotFound
from proxy.gates.evaluator import Evaluator
from proxy.gates.preferences import PreferenceJudge
from proxy.jobs.kinds import JobFailure, JobKind, JobKinds, JobRefused, RunningJob, Schedule
from proxy.jobs.sweeping import cleaning
from proxy.judges.service import JudgingService
from proxy.lifecycle.judging import JUDGING
from proxy.retention.eraser import EMPTYING, SessionEraser
from proxy.retention.retention import RetentionService
from proxy.settings import JobSettings
from proxy.transfer.exporting import EXPORTING, BackgroundExports
from proxy.transfer.parquet import ParquetNotInstalled
from proxy.versions.answer_pairs import PREFERRING
from proxy.webhooks.delivering import Delivery

# Retention is a matter of days: a minute more is not noticed, and an idle proxy writes four small rows for it.
RETENTION_SECONDS = 60.0
# Above the longest time that a judge may give its model (`JudgeSettings.timeout_seconds`), several times over:
# requests wait for others.
JUDGING_SECONDS = 1800.0
# A store of a million turns is exported within an hour.
EXPORTING_SECONDS = 6 * 3600.0


def job_kinds(
    *,
    database: Database,
    settings: JobSettings,
    clock: Clock,
    eraser: SessionEraser,
    retention: RetentionService,
    webhooks: Delivery,
    judging: JudgingService,
    exports: BackgroundExports,
    evaluator: Evaluator,
    preferences: PreferenceJudge,
) -> JobKinds:
    """Return all kinds with their schedules."""

    async def empty(_job: RunningJob) -> None:
        # Repeating it does no harm, so it needs no transaction with the completion.
        if not await eraser.empty_all():
            raise JobFailure("a reader prevents SQLite's log from being emptied of erased content")

    async def retain(job: RunningJob) -> dict[str, int]:
        erased = await retention.sweep_all()
        await empty(job)
        return {"erased": erased}

    kinds = JobKinds(
        [
            JobKind(name=EMPTYING, handler=empty, concurrency=1),
            JobKind(name="retention", handler=retain, concurrency=1),
            webhooks.kind(),
            export_kind(exports),
            evaluator.kind(),
            JobKind(
                name=JUDGING,
                handler=judging.run,
                concurrency=settings.judge_concurrency,
                timeout_seconds=JUDGING_SECONDS,
            ),
            JobKind(
                name=PREFERRING,
                handler=preferences.run,
                concurrency=settings.judge_concurrency,
                timeout_seconds=JUDGING_SECONDS,
            ),
        ],
        [Schedule(name="retention", kind="retention", every_seconds=RETENTION_SECONDS)],
    )
    kind, schedule = cleaning(database, settings, clock)
    kinds.register(kind)
    kinds.add_schedule(schedule)
    return kinds


def export_kind(exports: BackgroundExports) -> JobKind:
    """Return the kind of job that writes exports."""

    async def export(job: RunningJob) -> dict[str, Any]:
        try:
            return await exports.write(job.id, job.run_id or "", job.payload)
        except NotFound as error:
            raise JobRefused(error.message) from error
        except (OSError, ParquetNotInstalled) as error:
            raise JobFailure(str(error)) from error

    return JobKind(name=EXPORTING, handler=export, concurrency=2, timeout_seconds=EXPORTING_SECONDS)
