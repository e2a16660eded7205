"""Wires the proxy: settings in, an ASGI application out. Every service is built here and lives on `app.state`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from fastapi.telemetry import TelemetryConfig
from sqlalchemy import make_url
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy import machine
from proxy.admin import endpoints as admin_endpoints
from proxy.admin.sign_in import SignIn
from proxy.auth.http import authenticate
from proxy.auth.secret import load_secret
from proxy.auth.service import Credentials, PrincipalKind
from proxy.calls.service import ChatService
from proxy.claims import endpoints as claim_endpoints
from proxy.claims.service import ClaimService
from proxy.clock import Clock, system_clock
from proxy.database import migrate
from proxy.database.unit_of_work import Database
from proxy.dialects import endpoints as chat_endpoints
from proxy.dialects.messages import endpoints as messages_endpoints
from proxy.dialects.responses import endpoints as responses_endpoints
from proxy.engines.activity import EngineActivity
from proxy.engines.faults import EngineFaults
from proxy.engines.protocol import Engine
from proxy.engines.sglang import SglangEngine
from proxy.engines.watch import EngineWatch
from proxy.errors import StoreUnavailable
from proxy.feedback import endpoints as feedback_endpoints
from proxy.feedback.service import FeedbackService
from proxy.http import errors, openapi
from proxy.http.admission import BodyAdmission, BodyBytes
from proxy.http.boundary import RequestBoundary, RequestObserver
from proxy.http.descriptors import LOOK_SECONDS, DescriptorWatch
from proxy.http.plain_routes import PlainRoutes
from proxy.lifecycle.signals import Signals
from proxy.limits.service import RunLimits
from proxy.log import logger
from proxy.metrics import CONTENT_TYPE, Metrics, Stored
from proxy.overview import endpoints as overview_endpoints
from proxy.overview import key_endpoints
from proxy.overview.live import LOOK_AHEAD_SECONDS
from proxy.overview.rewards import endpoints as ledger_endpoints
from proxy.overview.service import OverviewService
from proxy.private_files import make_directory, tighten
from proxy.retention import endpoints as keeping_endpoints
from proxy.retention.erasing import EraseService
from proxy.retention.retention import RetentionService
from proxy.runs.asking import AskedBatches
from proxy.runs.service import RunDirectory, RunView
from proxy.serving.reconciler import SwapController
from proxy.sessions import endpoints as session_endpoints
from proxy.sessions.service import SessionService
from proxy.settings import ConfigurationError, EngineKind, ServerSettings, Settings, opentelemetry_is_set_up
from proxy.steps import endpoints as step_endpoints
from proxy.steps.service import StepService
from proxy.tokens.formats import check_tool_parser
from proxy.tokens.template import ChatTemplate
from proxy.transfer import endpoints as transfer_endpoints
from proxy.transfer.service import TransferService
from proxy.turns.service import TrajectoryStore
from proxy.versions import endpoints as policy_endpoints
from proxy.versions.inspector import WeightsInspector
from proxy.versions.retention import WeightRetention
from proxy.versions.service import VersionService

_MIB = 1 << 20
_MOST_BODIES_BYTES = 2048 * _MIB
_SWEEP_SECONDS = 2.0
_ERASURES_SECONDS = 1.0
"""How soon what another proxy erased is forgotten here."""

_CHECK_SECONDS = 5.0
"""How long a start waits for the check for damage: enough for a store of a gigabyte or so."""

_LOG = logger(__name__)

health = APIRouter(tags=["health"])


def create_app(settings: Settings, *, engine: Engine | None = None, clock: Clock = system_clock) -> FastAPI:
    """The application; its services start with its lifespan. `engine` and `clock` are for tests.

    Raises ConfigurationError without an engine's address; starting raises it for a wrong model, run or database, and
    StoreUnavailable for a database that is away, and leaves them in `app.state.startup_error`.
    """
    if engine is None and settings.engine.url is None:
        raise ConfigurationError(
            "engine.url: no engine is named; set it to the address of an SGLang server (in the file or as "
            "BASE_RL_ENGINE__URL), or use `base-rl up`, which starts an engine and fills it in"
        )
    check_tool_parser(settings.run.tool_parser)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                chosen = engine or SglangEngine(str(settings.engine.url), settings.engine)
                stack.push_async_callback(chosen.aclose)
                await _start(app, settings, chosen, clock, stack)
            except (ConfigurationError, StoreUnavailable) as error:
                app.state.startup_error = error
                raise
            _LOG.info("ready", run=settings.run.name, model=settings.run.model)
            yield

    app = _Application(title="base-rl", lifespan=lifespan, docs_url=None, redoc_url=None, telemetry=_telemetry())
    app.state.settings = settings
    app.state.startup_error = None
    app.state.engine_activity = EngineActivity()
    app.state.metrics = Metrics(app.state.engine_activity)
    errors.install(app)
    for router in (
        health,
        chat_endpoints.router,
        messages_endpoints.router,
        responses_endpoints.router,
        session_endpoints.router,
        feedback_endpoints.router,
        claim_endpoints.router,
        step_endpoints.router,
        policy_endpoints.router,
        keeping_endpoints.router,
        transfer_endpoints.router,
        overview_endpoints.router,
        key_endpoints.router,
        ledger_endpoints.router,
        admin_endpoints.router,
    ):
        app.include_router(router)
    openapi.install(app)
    app.add_edge(
        (chat_endpoints.router, messages_endpoints.router, responses_endpoints.router),
        max_body_bytes=settings.server.max_body_mib * _MIB,
        in_work=_body_bytes(settings.server),
        observer=app.state.metrics,
    )
    return app


class _Application(FastAPI):
    """FastAPI behind layers of our own: model calls are answered there, without the framework's middleware."""

    def add_edge(
        self,
        plain_routers: Sequence[APIRouter],
        *,
        max_body_bytes: int,
        in_work: BodyBytes,
        observer: RequestObserver,
    ) -> None:
        plain = PlainRoutes(super().__call__, plain_routers)
        admission = BodyAdmission(plain, limit=max_body_bytes, in_work=in_work, authenticate=_key_of)
        self._edge: ASGIApp = RequestBoundary(admission, observer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._edge(scope, receive, send)


async def _key_of(scope: Scope) -> str | None:
    """Return the id of the request's key; None without one. Raises AuthenticationFailed."""
    who = await authenticate(scope)
    return None if who is None else str(who.key_id)


def _body_bytes(server: ServerSettings) -> BodyBytes:
    """Return the counter of bodies in work, with bounds that fit the machine where the settings name none.

    A body's JSON, its texts and its token ids take several times its size while it is worked on, and the rest of the
    proxy needs memory too: hence an eighth. Every bound lets one body of the largest size pass.
    """
    largest = server.max_body_mib * _MIB
    if server.max_bodies_mib is not None:
        most = server.max_bodies_mib * _MIB
    else:
        most = max(2 * largest, min(_MOST_BODIES_BYTES, machine.memory_limit() // 8))
    per_key = most // 2 if server.max_bodies_mib_per_key is None else server.max_bodies_mib_per_key * _MIB
    return BodyBytes(most=max(most, largest), most_per_key=max(per_key, largest))


def _telemetry() -> TelemetryConfig | None:
    """FastAPI reports to OpenTelemetry where that is set up, and asks at every request whether it is."""
    return None if opentelemetry_is_set_up() else {"tracing": False, "metrics": False, "logs": False}


def begin_stop(app: FastAPI) -> None:
    """Ends what would otherwise keep connections open until the end of the grace period: event streams and
    trainers that wait for trajectories."""
    app.state.overview.close()
    app.state.claims.close()


async def _start(app: FastAPI, settings: Settings, engine: Engine, clock: Clock, stack: AsyncExitStack) -> None:
    """Builds every service, in order of need; `stack` ends them in reverse."""
    state = app.state
    with _data_dir_in_use(settings):
        _keep_private(settings)
        secret = load_secret(settings.server.data_dir)
    state.database = database = await _open_database(settings)
    stack.push_async_callback(database.aclose)
    state.signals = signals = Signals()
    state.credentials = credentials = Credentials(
        database, secret, clock, outlive_store=settings.database.when_unavailable == "serve"
    )
    state.sign_in = SignIn(secret=secret, clock=clock, credentials=credentials, database=database)
    state.runs = runs = RunDirectory(database, clock)
    state.run = await _begin_run(settings, runs, credentials)
    state.limits = limits = RunLimits(database, clock, observer=state.metrics)
    stack.push_async_callback(limits.aclose)
    state.sessions = sessions = SessionService(
        database, runs, credentials, signals, clock, observer=state.metrics, limits=limits
    )
    state.feedback = feedback = FeedbackService(database, signals, clock, observer=state.metrics)
    await feedback.apply_changed_rules()
    state.trajectories = TrajectoryStore(database=database, clock=clock, signals=signals)
    state.asked = AskedBatches()
    state.claims = claims = ClaimService(
        database=database, clock=clock, signals=signals, activity=state.engine_activity, asked=state.asked
    )
    state.steps = StepService(database=database)
    state.retention_of_weights = WeightRetention(database=database, clock=clock, signals=signals)
    state.inspector = inspector = WeightsInspector(settings.weights_dir)
    stack.push_async_callback(inspector.aclose)
    state.versions = VersionService(database=database, clock=clock, signals=signals, inspector=inspector)
    state.transfer = TransferService(
        database=database, clock=clock, signals=signals, pseudonyms_of=credentials.pseudonyms_of
    )
    state.erasing = erasing = EraseService(database, runs, credentials, signals, clock, observer=state.metrics)
    retention = RetentionService(database, runs, erasing, clock)
    await _start_serving(app, engine, clock, stack)
    signals.erasures.listen(state.chat.forget)
    signals.requested_erasures.listen(state.chat.forget_texts)
    await stack.enter_async_context(_repeated("erasures", _ERASURES_SECONDS, erasing.listen))

    async def sweep() -> None:
        await credentials.write_uses()
        await sessions.sweep()
        await claims.expire()
        await retention.sweep()

    await stack.enter_async_context(_repeated("sweep", _SWEEP_SECONDS, sweep))
    await stack.enter_async_context(_repeated("descriptors", LOOK_SECONDS, DescriptorWatch().look))


async def _start_serving(app: FastAPI, engine: Engine, clock: Clock, stack: AsyncExitStack) -> None:
    """What needs the engine or the model: swaps, model calls, and the overview, which tells of both."""
    state = app.state
    state.engine = engine
    faults = EngineFaults(clock)
    template = await asyncio.to_thread(
        ChatTemplate.load,
        state.run.base_model,
        allow_control_tokens=state.settings.run.allow_control_tokens,
    )
    state.swaps = SwapController(
        database=state.database,
        engine=engine,
        signals=state.signals,
        clock=clock,
        run=state.run,
        inspector=state.inspector,
        health_interval_seconds=state.settings.engine.health_interval_seconds,
        observer=state.metrics,
    )
    state.chat = ChatService(
        settings=state.settings,
        template=template,
        runs=state.runs,
        sessions=state.sessions,
        trajectories=state.trajectories,
        swaps=state.swaps,
        engine=engine,
        clock=clock,
        observer=state.metrics,
        limits=state.limits,
        activity=state.engine_activity,
        faults=faults,
    )
    state.overview = OverviewService(
        database=state.database,
        clock=clock,
        signals=state.signals,
        swaps=state.swaps,
        data_dir=state.settings.server.data_dir,
        token_text=template.readable_token,
        faults=faults,
        asked=state.asked,
        has_weights=state.settings.engine.kind != EngineKind.SCRIPTED,
        serves_unrecorded=state.settings.database.when_unavailable == "serve",
    )
    stack.callback(state.overview.close)
    await stack.enter_async_context(_repeated("overview", LOOK_AHEAD_SECONDS, state.overview.look_ahead))
    await stack.enter_async_context(_background("swaps", state.swaps.run_forever()))
    settings = state.settings.engine
    watch = EngineWatch(
        engine,
        interval_seconds=settings.health_interval_seconds,
        patience_seconds=settings.health_timeout_seconds,
        changed=state.swaps.recheck_engine,
    )
    await stack.enter_async_context(_background("engine watch", watch.run_forever()))
    stack.push_async_callback(state.chat.aclose)


def _keep_private(settings: Settings) -> None:
    """Make the data directory, or close one that an earlier version left open to others."""
    make_directory(settings.server.data_dir)
    store = make_url(settings.database_url)
    changed = tighten(
        settings.server.data_dir,
        store=Path(str(store.database)) if store.get_backend_name() == "sqlite" else None,
        directory=not settings.server.shared_data_dir,
    )
    if changed:
        _LOG.warning("other users could read these; now only their owner can", paths=[str(path) for path in changed])


@contextmanager
def _data_dir_in_use(settings: Settings) -> Iterator[None]:
    """Turn the system's refusal into a sentence for whoever starts the proxy."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"the data directory {settings.server.data_dir} cannot be used ({error.strerror or error}): give base-rl "
            "the right to write there, or name another with server.data_dir or --data-dir"
        ) from error


async def _open_database(settings: Settings) -> Database:
    """The store, migrated. A thread, because migrations are synchronous and may wait for another process's."""
    database = Database(
        settings.database_url,
        synchronous=settings.database.synchronous,
        busy_timeout_seconds=settings.database.busy_timeout_seconds,
        connect_timeout_seconds=settings.database.connect_timeout_seconds,
        statement_timeout_seconds=settings.database.statement_timeout_seconds,
        connections=settings.database.connections,
    )
    try:
        await asyncio.to_thread(migrate.upgrade, settings.database_url)
        await database.check_integrity(patience_seconds=_CHECK_SECONDS)
    except BaseException:
        await database.aclose()
        raise
    return database


async def _begin_run(settings: Settings, runs: RunDirectory, credentials: Credentials) -> RunView:
    """Return the run that is served, with its bootstrap keys. A new one whose keys belong to another run was named by
    mistake: it is removed again, so that the mistake leaves nothing behind. Raises ConfigurationError."""
    known = {each.name for each in await runs.list_()}
    run = await runs.ensure(settings.run)
    try:
        await _register_bootstrap_keys(settings, credentials, run)
    except ConfigurationError as error:
        if run.name in known:
            raise
        await runs.delete(run.id, served="")
        has = (
            f" (run.name: there is no run {run.name!r} yet; the store has {', '.join(sorted(known))})"
            if known
            else ""
        )
        raise ConfigurationError(f"{error}{has}") from error
    return run


async def _register_bootstrap_keys(settings: Settings, credentials: Credentials, run: RunView) -> None:
    keys = settings.bootstrap
    for kind, text, run_id in (
        (PrincipalKind.ADMIN, keys.admin_key, None),
        (PrincipalKind.RUN, keys.run_key, run.id),
        (PrincipalKind.TRAINER, keys.trainer_key, run.id),
    ):
        if text is not None:
            await credentials.register(kind, text.get_secret_value(), run_id=run_id)


@asynccontextmanager
async def _repeated(name: str, seconds: float, action: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Runs `action` every so many seconds, in the background, until the block ends. Failures are logged."""

    async def run() -> None:
        while True:
            try:
                await action()
            except StoreUnavailable as error:
                _LOG.warning("background task waits for the store", task=name, error=error.message)
            except Exception:  # noqa: BLE001  (recorded, and the next round may do better)
                _LOG.exception("background task failed", task=name)
            await asyncio.sleep(seconds)

    async with _background(name, run()):
        yield


@asynccontextmanager
async def _background(name: str, work: Awaitable[None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("background task ended with an error", task=name, error=repr(task.exception()))


@health.get("/", include_in_schema=False)
async def front_door() -> RedirectResponse:
    """Who opens the bare address in a browser wants the admin page."""
    return RedirectResponse("/admin", status_code=303)


@health.get("/healthz")
async def healthz() -> JSONResponse:
    """The process answers. Says nothing about its surroundings: see /readyz."""
    return JSONResponse({"status": "ok", "service": "base-rl"})


@health.get("/readyz", openapi_extra={"responses": {"503": {"description": "What is missing."}}})
async def readyz(request: Request) -> JSONResponse:
    """200 when a model call would be served now: the store takes writes, the engine is up and holds our weights.
    503 with what is missing otherwise. Where calls are served without the store, `unrecorded` says why they are."""
    state = request.app.state
    missing: dict[str, str] = {}
    unrecorded: dict[str, str] = {}
    try:
        await state.database.check_writable()
    except StoreUnavailable as error:
        if state.settings.database.when_unavailable == "serve":
            unrecorded["unrecorded"] = error.message
        else:
            missing["store"] = error.message
    if not state.swaps.engine_ready:
        unknown = "the engine does not answer, or does not hold a version of this run yet"
        missing["engine"] = state.swaps.engine_problem or unknown
    serving = state.swaps.serving(state.run.id)
    answer = {"ready": not missing, "missing": missing, "serving_version": serving, **unrecorded}
    return JSONResponse(answer, 503 if missing else 200)


@health.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """For Prometheus. Unauthenticated, like the probes: it holds counts and run names, no content; where the proxy
    listens beyond loopback, let the gateway decide who may read it."""
    state = request.app.state
    stored = Stored()
    # What this process counted is told all the same.
    with suppress(StoreUnavailable):
        stored = Stored(
            sessions=await state.overview.sessions_by_training(),
            revised=await state.sessions.count_revised(),
            steps=await state.overview.last_steps(),
        )
    return Response(state.metrics.render(stored), media_type=CONTENT_TYPE)
