"""The ASGI application: settings in, an application out whose services start with its lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy import machine, probes
from proxy.admin import endpoints as admin_endpoints
from proxy.auth.http import authenticate
from proxy.background import start_background
from proxy.claims import endpoints as claim_endpoints
from proxy.clock import Clock, system_clock
from proxy.dialects import endpoints as chat_endpoints
from proxy.dialects.messages import endpoints as messages_endpoints
from proxy.dialects.responses import endpoints as responses_endpoints
from proxy.engines.activity import EngineActivity
from proxy.engines.protocol import Engine
from proxy.engines.sglang import SglangEngine
from proxy.errors import StoreUnavailable
from proxy.feedback import endpoints as feedback_endpoints
from proxy.gates import endpoints as gate_endpoints
from proxy.http import errors, openapi
from proxy.http.admission import BodyAdmission, BodyBytes
from proxy.http.boundary import RequestBoundary, RequestObserver
from proxy.http.plain_routes import PlainRoutes
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.jobs import endpoints as job_endpoints
from proxy.judges import endpoints as judge_endpoints
from proxy.keys import endpoints as key_endpoints
from proxy.log import logger
from proxy.metrics import Metrics
from proxy.overview import endpoints as overview_endpoints
from proxy.overview import event_endpoints, run_endpoints
from proxy.overview.rewards import endpoints as ledger_endpoints
from proxy.projects import endpoints as project_endpoints
from proxy.retention import endpoints as keeping_endpoints
from proxy.services import Services, build_services
from proxy.serving import endpoints as engine_endpoints
from proxy.sessions import endpoints as session_endpoints
from proxy.settings import ConfigurationError, ServerSettings, Settings, opentelemetry_is_set_up
from proxy.steps import endpoints as step_endpoints
from proxy.tokens.formats import check_tool_parser
from proxy.transfer import endpoints as transfer_endpoints
from proxy.usage import endpoints as usage_endpoints
from proxy.versions import endpoints as policy_endpoints
from proxy.versions import steering_endpoints
from proxy.webhooks import endpoints as webhook_endpoints

_MIB = 1 << 20

_LOG = logger(__name__)


class Application(FastAPI):
    """The proxy. Model calls are answered by layers of its own, without the framework's middleware.

    `startup_error`: why the start was refused. `services`: the running services; read it only after the start.
    """

    services: Services
    startup_error: ConfigurationError | StoreUnavailable | None = None

    def __init__(self, settings: Settings, engines: Mapping[str, Engine], clock: Clock) -> None:
        self.settings = settings
        self._engines = engines
        self._clock = clock
        self._activity = EngineActivity()
        self.metrics = Metrics(self._activity)
        # FastAPI asks at every request whether OpenTelemetry is set up, unless it is switched off here.
        telemetry: TelemetryConfig | None = {"tracing": False, "metrics": False, "logs": False}
        super().__init__(
            title="base-rl",
            lifespan=_lifespan,
            docs_url=None,
            redoc_url=None,
            telemetry=None if opentelemetry_is_set_up() else telemetry,
        )

    def add_edge(self, plain_routers: Sequence[APIRouter], observer: RequestObserver) -> None:
        """Put the bounds on bodies and the short way to the routes of `plain_routers` before the framework."""
        server = self.settings.server
        plain = PlainRoutes(super().__call__, plain_routers)
        admission = BodyAdmission(
            plain, limit=server.max_body_mib * _MIB, in_work=_body_bytes(server), authenticate=_key_of
        )
        self._edge: ASGIApp = RequestBoundary(admission, observer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._edge(scope, receive, send)

    async def start(self, stack: AsyncExitStack) -> None:
        """Build the services and start their background tasks; `stack` ends them in reverse.

        Raises ConfigurationError and StoreUnavailable, and records either in `startup_error`.
        """
        try:
            self.services = await build_services(
                self.settings,
                make_engine=self._make_engine,
                metrics=self.metrics,
                activity=self._activity,
                machine_clock=self._clock,
                stack=stack,
            )
            provide(self, self.services, *self.services.each())
            await start_background(self.services, stack)
        except (ConfigurationError, StoreUnavailable) as error:
            self.startup_error = error
            raise

    def _make_engine(self, url: str) -> Engine:
        return self._engines.get(url) or SglangEngine(url, self.settings.engine)

    def begin_stop(self) -> None:
        """End event streams and the claims of trainers that wait for trajectories: they would keep their connections
        open until the end of the grace period."""
        self.services.overview.close()
        self.services.claims.close()


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    assert isinstance(app, Application)
    async with AsyncExitStack() as stack:
        await app.start(stack)
        _LOG.info("ready", run=app.settings.run.name, model=app.settings.run.model)
        yield


def create_app(
    settings: Settings,
    *,
    engine: Engine | None = None,
    engines: Mapping[str, Engine] | None = None,
    clock: Clock = system_clock,
    engines_join: bool = False,
) -> Application:
    """Return the application; its services start with its lifespan.

    With `engines_join`, the configuration need not name an engine: calls get 503 until one is added. For tests:
    `engine` replaces that of the configuration, `engines` those at some addresses, `clock` this machine's.

    Raises ConfigurationError without an engine's address otherwise. The start raises it for a wrong model, run or
    database, and StoreUnavailable for a database that does not answer.
    """
    if engine is not None:
        address = settings.engine.model_copy(update={"url": engine.name})
        settings = settings.model_copy(update={"engine": address})
    elif settings.engine.url is None and not settings.engines and not engines_join:
        raise ConfigurationError(
            "engine.url: no engine is named; set it to the address of an SGLang server (in the file or as "
            "BASE_RL_ENGINE__URL), add an [engines.NAME] table, or use `base-rl up`, which starts an engine and "
            "fills it in, or `base-rl proxy`, which waits for engines to join"
        )
    for run in settings.declared_runs:
        check_tool_parser(run.tool_parser)
    app = Application(settings, dict(engines or {}) if engine is None else {engine.name: engine}, clock)
    errors.install(app)
    model_calls = (chat_endpoints.router, messages_endpoints.router, responses_endpoints.router)
    for router in (
        probes.router,
        *model_calls,
        session_endpoints.router,
        feedback_endpoints.router,
        claim_endpoints.router,
        step_endpoints.router,
        policy_endpoints.router,
        gate_endpoints.router,
        steering_endpoints.router,
        keeping_endpoints.router,
        transfer_endpoints.router,
        overview_endpoints.router,
        run_endpoints.router,
        event_endpoints.router,
        key_endpoints.router,
        engine_endpoints.router,
        job_endpoints.router,
        judge_endpoints.router,
        project_endpoints.router,
        usage_endpoints.router,
        webhook_endpoints.router,
        ledger_endpoints.router,
        admin_endpoints.router,
    ):
        add_routes(app, router)
    openapi.install(app)
    app.add_edge(model_calls, observer=app.metrics)
    return app


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
        most = max(2 * largest, machine.default_body_bytes())
    per_key = most // 2 if server.max_bodies_mib_per_key is None else server.max_bodies_mib_per_key * _MIB
    return BodyBytes(most=max(most, largest), most_per_key=max(per_key, largest))
