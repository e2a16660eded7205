"""Every service of the proxy, built in one place in order of need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields

from proxy.admin.sign_in import SignIn
from proxy.auth.service import Credentials
from proxy.calls.judging import JudgesByRuns
from proxy.calls.service import CallService
from proxy.claims.service import ClaimService
from proxy.clock import Clock
from proxy.database.store_clock import StoreClock
from proxy.database.unit_of_work import Database
from proxy.engines.activity import EngineActivity
from proxy.engines.faults import EngineFaults
from proxy.engines.protocol import Engine
from proxy.feedback.service import FeedbackService
from proxy.gates.evaluator import Evaluator
from proxy.gates.holds import VersionHolds
from proxy.gates.keeper import GateKeeper
from proxy.gates.preferences import PreferenceJudge
from proxy.gates.service import GateService
from proxy.job_kinds import job_kinds
from proxy.jobs.service import JobService
from proxy.jobs.setup import Jobs, build_jobs
from proxy.judges.directory import JudgeDirectory
from proxy.judges.functions import Functions
from proxy.judges.models import JudgeModels
from proxy.judges.prompts import Prompts
from proxy.judges.service import JudgingService
from proxy.judges.tools import Tools
from proxy.judges.trials import JudgeTrials
from proxy.lifecycle.signals import Signals
from proxy.limits.service import Limits
from proxy.metrics import Metrics
from proxy.outbound.client import Client
from proxy.outbound.secrets import SigningSecrets
from proxy.overview.service import OverviewService
from proxy.projects.service import ProjectDirectory
from proxy.retention.erasing import EraseService
from proxy.retention.retention import RetentionService
from proxy.runs.asking import AskedBatches
from proxy.runs.deletion import RunDeletion
from proxy.runs.management import RunManagement
from proxy.runs.served import ServedRuns
from proxy.runs.service import RunDirectory
from proxy.runs.switch import RunSwitch
from proxy.serving.admission import EngineAdmission
from proxy.serving.canaries import CanaryCheck
from proxy.serving.configured import engine_specs
from proxy.serving.directory import EngineDirectory
from proxy.serving.pool import EnginePool
from proxy.serving.registry import EngineRegistry
from proxy.sessions.service import SessionService
from proxy.settings import ConfigurationError, EngineKind, Settings
from proxy.startup import begin_other_runs, begin_run, open_database, prepare_data_dir
from proxy.steps.service import StepService
from proxy.transfer.exporting import BackgroundExports
from proxy.transfer.service import TransferService
from proxy.turns.service import TrajectoryStore
from proxy.usage.service import UsageService
from proxy.versions.answer_pairs import AnswerPairs
from proxy.versions.inspector import WeightsInspector
from proxy.versions.retention import WeightRetention
from proxy.versions.saving import UnsavedVersions
from proxy.versions.service import VersionService
from proxy.versions.steering import VersionSteering
from proxy.webhooks.delivering import Delivery
from proxy.webhooks.following import WebhookFollower
from proxy.webhooks.service import WebhookService


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services of a started proxy. Endpoints find the one they need by its type (`proxy/http/services.py`)."""

    settings: Settings
    metrics: Metrics
    database: Database
    clock: StoreClock
    signals: Signals
    credentials: Credentials
    projects: ProjectDirectory
    usage: UsageService
    sign_in: SignIn
    runs: RunDirectory
    run_switch: RunSwitch
    run_management: RunManagement
    run_deletion: RunDeletion
    served: ServedRuns
    sessions: SessionService
    feedback: FeedbackService
    claims: ClaimService
    steps: StepService
    versions: VersionService
    weight_retention: WeightRetention
    unsaved_versions: UnsavedVersions
    version_steering: VersionSteering
    gates: GateService
    evaluator: Evaluator
    gate_keeper: GateKeeper
    version_holds: VersionHolds
    transfer: TransferService
    exports: BackgroundExports
    erasing: EraseService
    retention: RetentionService
    judges: JudgeDirectory
    judge_trials: JudgeTrials
    jobs: JobService
    background_jobs: Jobs
    webhooks: WebhookService
    webhook_follower: WebhookFollower
    engines: EnginePool
    engine_directory: EngineDirectory
    engine_admission: EngineAdmission
    calls: CallService
    overview: OverviewService

    def each(self) -> tuple[object, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def _inspector_of(settings: Settings) -> WeightsInspector:
    """Return the check of versions. Raises ConfigurationError if an object store's library is not installed."""
    server = settings.server
    try:
        return WeightsInspector(
            settings.weights_dir,
            settings.weights_cache_dir,
            int(server.weights_cache_gigabytes * 1e9),
            url=server.weights_url,
            memory=settings.weights_memory_dir,
            senders=server.weights_senders,
            max_norm_change=server.max_norm_change,
        )
    except ImportError as error:
        raise ConfigurationError(f"server.weights_url: {error}") from error


async def build_services(
    settings: Settings,
    *,
    make_engine: Callable[[str], Engine],
    metrics: Metrics,
    activity: EngineActivity,
    machine_clock: Clock,
    stack: AsyncExitStack,
) -> Services:
    """Build every service; `stack` closes them in reverse. None does background work yet (`proxy/background.py`).

    Raises ConfigurationError for a wrong data directory, database, run, key or model, and StoreUnavailable.
    """
    outlive_store = settings.database.when_unavailable == "serve"
    secret = prepare_data_dir(settings)
    database = await open_database(settings)
    stack.push_async_callback(database.aclose)
    clock = await StoreClock.open(database, machine_clock)
    signals = Signals()
    credentials = Credentials(database, secret, clock, outlive_store=outlive_store)
    inspector = _inspector_of(settings)
    stack.push_async_callback(inspector.aclose)
    projects = ProjectDirectory(database, signals, clock)
    runs = RunDirectory(database, clock, inspector.check)
    limits = Limits(database, clock, observer=metrics, signals=signals)
    stack.push_async_callback(limits.aclose)
    sessions = SessionService(database, runs, credentials, signals, clock, observer=metrics, limits=limits)
    feedback = FeedbackService(database, signals, clock, observer=metrics)
    asked = AskedBatches()
    erasing = EraseService(database, runs, credentials, signals, clock, observer=metrics)
    retention = RetentionService(database, runs, erasing, clock)
    outbound = Client(settings.outbound, clock=clock)
    stack.push_async_callback(outbound.aclose)
    webhook_secrets = SigningSecrets(secret)
    faults = EngineFaults(clock)
    specs = engine_specs(settings)
    registry = EngineRegistry(
        database=database,
        signals=signals,
        clock=clock,
        specs=specs,
        interval_seconds=settings.engine.health_interval_seconds,
    )
    engines = EnginePool(
        registry=registry,
        make_engine=make_engine,
        settings=settings.engine,
        database=database,
        runs=runs,
        signals=signals,
        clock=clock,
        inspector=inspector,
        activity=activity,
        declared=[declared.name for declared in settings.declared_runs],
        observer=metrics,
    )
    stack.push_async_callback(engines.aclose)
    metrics.watch_engines(engines.views)
    calls = CallService(
        settings=settings,
        runs=runs,
        sessions=sessions,
        trajectories=TrajectoryStore(database=database, clock=clock, signals=signals),
        pairs=AnswerPairs(database=database, signals=signals, clock=clock),
        swaps=engines,
        clock=clock,
        observer=metrics,
        limits=limits,
        faults=faults,
    )
    judge_models = JudgeModels(
        settings.providers,
        JudgesByRuns(
            runs=runs,
            catalog=calls.models,
            runtimes=calls.runtimes,
            swaps=engines,
            clock=clock,
            faults=faults,
            busy_share=settings.judging.busy_share,
        ),
    )
    stack.push_async_callback(judge_models.aclose)
    prompts = Prompts(settings.judging.prompts_dir)
    tools = Tools(
        models=judge_models,
        client=outbound,
        secrets=webhook_secrets,
        functions=Functions(settings.judging, in_proxy=True),
    )
    exports = BackgroundExports(
        database=database,
        runs=runs,
        signals=signals,
        clock=clock,
        directory=settings.exports_dir,
        store_url=settings.server.exports_url,
    )
    preferences = PreferenceJudge(database, tools, prompts, signals, clock, metrics)
    evaluator = Evaluator(
        database=database, runs=runs, client=outbound, secrets=webhook_secrets, signals=signals, clock=clock
    )
    jobs = build_jobs(
        settings.jobs,
        database=database,
        kinds=job_kinds(
            database=database,
            settings=settings.jobs,
            clock=clock,
            eraser=erasing,
            retention=retention,
            webhooks=Delivery(database, outbound, webhook_secrets, signals, clock),
            judging=JudgingService(database, tools, prompts, signals, clock, metrics),
            exports=exports,
            evaluator=evaluator,
            preferences=preferences,
        ),
        signals=signals,
        clock=clock,
        observer=metrics,
        stack=stack,
    )
    # After the engines: a wrong address or model must end the start before anything of it is in the store.
    check = CanaryCheck(calls.runtimes.check, registry=registry, specs=specs)
    run = await begin_run(settings, runs, credentials, check)
    await calls.runtimes.load(run)
    await begin_other_runs(settings, runs, check)
    await feedback.apply_changed_rules()
    await registry.register()
    await engines.refresh()
    deletion = RunDeletion(
        database=database,
        signals=signals,
        clock=clock,
        weights_dir=settings.weights_dir,
        memory_dir=settings.weights_memory_dir,
        remove_stored=inspector.remove_stored,
    )
    stack.push_async_callback(deletion.aclose)
    signals.erasures.listen(calls.forget)
    signals.requested_erasures.listen(calls.forget_texts)
    overview = OverviewService(
        database=database,
        clock=clock,
        signals=signals,
        engines=engines,
        data_dir=settings.server.data_dir,
        token_text=calls.token_text,
        faults=faults,
        asked=asked,
        has_weights=settings.engine.kind != EngineKind.SCRIPTED,
        serves_unrecorded=outlive_store,
    )
    stack.callback(overview.close)
    return Services(
        settings=settings,
        metrics=metrics,
        database=database,
        clock=clock,
        signals=signals,
        credentials=credentials,
        projects=projects,
        usage=UsageService(database, runs, projects, credentials, clock),
        sign_in=SignIn(secret=secret, clock=clock, credentials=credentials, database=database),
        runs=runs,
        run_switch=RunSwitch(database, signals, clock),
        run_management=RunManagement(
            database=database,
            runs=runs,
            signals=signals,
            clock=clock,
            check=check,
            apply_rules=feedback.apply_changed_rules,
            check_weights=inspector.check,
        ),
        run_deletion=deletion,
        served=ServedRuns(
            first_run=run,
            is_placed=engines.is_placed,
            context_length=calls.context_length,
            weight_formats=engines.formats,
            engines=engines.count,
        ),
        sessions=sessions,
        feedback=feedback,
        claims=ClaimService(
            database=database,
            clock=clock,
            signals=signals,
            activity=activity,
            asked=asked,
            template_of=calls.template,
        ),
        steps=StepService(database=database),
        versions=VersionService(database=database, clock=clock, signals=signals, inspector=inspector),
        weight_retention=WeightRetention(database=database, clock=clock, signals=signals),
        unsaved_versions=UnsavedVersions(database=database, clock=clock, signals=signals, inspector=inspector),
        version_steering=VersionSteering(database=database, clock=clock, signals=signals),
        gates=GateService(database=database, signals=signals, clock=clock),
        evaluator=evaluator,
        gate_keeper=GateKeeper(database=database, runs=runs, signals=signals, clock=clock),
        version_holds=VersionHolds(database=database, signals=signals, clock=clock),
        transfer=TransferService(
            database=database, clock=clock, signals=signals, pseudonyms_of=credentials.pseudonyms_of
        ),
        exports=exports,
        erasing=erasing,
        retention=retention,
        judges=JudgeDirectory(database, prompts, signals, clock),
        judge_trials=JudgeTrials(database, tools, prompts, webhook_secrets, clock),
        jobs=jobs.service,
        background_jobs=jobs,
        webhooks=WebhookService(database, outbound, webhook_secrets, jobs.service, signals, clock),
        webhook_follower=WebhookFollower(database, signals, clock),
        engines=engines,
        engine_directory=EngineDirectory(
            pool=engines, registry=registry, database=database, signals=signals, clock=clock
        ),
        engine_admission=EngineAdmission(runs=runs, make_engine=make_engine, context_length=calls.context_length),
        calls=calls,
        overview=overview,
    )
