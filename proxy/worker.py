"""`base-rl worker`: a process that runs background jobs whose ids come through Redis. It needs the proxies' database.

Nothing is lost if it is killed: its leases pass, and another worker has the jobs. While Redis is away, it goes on
with the jobs that it finds in the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from proxy.auth.secret import find_secret
from proxy.clock import Clock
from proxy.contract.extras import missing_packages
from proxy.database.store_clock import StoreClock
from proxy.database.unit_of_work import Database
from proxy.gates.evaluator import Evaluator
from proxy.gates.preferences import PreferenceJudge
from proxy.job_kinds import job_kinds
from proxy.jobs.kinds import JobKinds
from proxy.jobs.running import JobRunner
from proxy.jobs.worker import JobWorker
from proxy.judges.functions import Functions
from proxy.judges.models import JudgeModels
from proxy.judges.prompts import Prompts
from proxy.judges.service import JudgingService
from proxy.judges.tools import Tools
from proxy.lifecycle.signals import Signals
from proxy.log import logger
from proxy.metrics import Metrics
from proxy.outbound.client import Client
from proxy.outbound.secrets import SigningSecrets
from proxy.retention.eraser import SessionEraser
from proxy.retention.retention import RetentionService
from proxy.runs.service import RunDirectory
from proxy.settings import ConfigurationError, Settings
from proxy.startup import open_database
from proxy.transfer.exporting import BackgroundExports
from proxy.webhooks.delivering import Delivery

# How long a due job's message may take before workers take the job without it.
LATE_SECONDS = 15.0

_LOG = logger(__name__)

MakeKinds = Callable[[Database, Settings, Signals, Metrics, Clock], JobKinds]


def worker_kinds(
    database: Database, settings: Settings, signals: Signals, metrics: Metrics, clock: Clock
) -> JobKinds:
    """Return the kinds that a worker runs, with the services that they need."""
    eraser = SessionEraser(database, signals, clock, observer=metrics)
    runs = RunDirectory(database, clock)
    retention = RetentionService(database, runs, eraser, clock)
    # Never a new secret: with another one than the proxies', this worker would sign so that no receiver accepts it.
    secrets = SigningSecrets(find_secret(settings.server.data_dir))
    client = Client(settings.outbound, clock=clock)
    webhooks = Delivery(database, client, secrets, signals, clock)
    tools = Tools(
        models=JudgeModels(settings.providers),
        client=client,
        secrets=secrets,
        functions=Functions(settings.judging, in_proxy=False),
    )
    exports = BackgroundExports(
        database=database,
        runs=runs,
        signals=signals,
        clock=clock,
        directory=settings.exports_dir,
        store_url=settings.server.exports_url,
    )
    prompts = Prompts(settings.judging.prompts_dir)
    judging = JudgingService(database, tools, prompts, signals, clock, metrics)
    return job_kinds(
        database=database,
        settings=settings.jobs,
        clock=clock,
        eraser=eraser,
        retention=retention,
        webhooks=webhooks,
        judging=judging,
        exports=exports,
        evaluator=Evaluator(
            database=database, runs=runs, client=client, secrets=secrets, signals=signals, clock=clock
        ),
        preferences=PreferenceJudge(database, tools, prompts, signals, clock, metrics),
    )


def run_worker(
    settings: Settings,
    *,
    concurrency: int | None = None,
    metrics_port: int | None = None,
    make_kinds: MakeKinds = worker_kinds,
    late_seconds: float = LATE_SECONDS,
) -> None:
    """Run jobs until SIGTERM or SIGINT. `metrics_port` serves /metrics for Prometheus on all addresses.

    Raise ConfigurationError without a broker or its packages, and StoreUnavailable if the database does not answer.
    """
    if settings.jobs.broker is None:
        raise ConfigurationError(
            "jobs.broker: no broker is named, so the proxies run all jobs themselves; set it to the address of a "
            "Redis (in the file or as BASE_RL_JOBS__BROKER) for them and for the workers"
        )
    if reason := missing_packages("celery"):
        raise ConfigurationError(reason)
    from proxy.jobs import celery_worker

    name = celery_worker.worker_name()
    places = concurrency or settings.jobs.concurrency
    metrics = Metrics()
    if metrics_port is not None:
        from prometheus_client import start_http_server

        start_http_server(metrics_port, registry=metrics.registry)

    async def start() -> tuple[celery_worker.SentJobs, Callable[[], Awaitable[None]]]:
        database = await open_database(settings)
        clock = await StoreClock.open(database)
        signals = Signals()
        runner = JobRunner(
            database,
            make_kinds(database, settings, signals, metrics, clock),
            signals,
            clock,
            worker=name,
            concurrency=places,
            lease_seconds=settings.jobs.lease_seconds,
            observer=metrics,
        )
        worker = JobWorker(runner, database, signals, clock, late_seconds=late_seconds)
        tasks = [
            asyncio.create_task(worker.run(), name="job worker"),
            asyncio.create_task(clock.run(), name="clock"),
        ]
        _LOG.info("ready", worker=name, concurrency=places)

        async def close() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await database.aclose()

        return celery_worker.SentJobs(runner, database, signals), close

    celery_worker.serve(settings.jobs, start, name=name, concurrency=places, log_level=settings.server.log_level)
