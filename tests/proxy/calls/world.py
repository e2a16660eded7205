"""Model calls over HTTP on a real store, with an engine that answers from a script."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import uvicorn
from fastapi import FastAPI
from sqlalchemy import select
from starlette.applications import Starlette

from proxy.auth.service import PrincipalKind
from proxy.calls.service import CallService
from proxy.contract.arrays import unpack_ids
from proxy.contract.identifiers import RunId
from proxy.contract.policy import weight_label
from proxy.contract.turn import Turn
from proxy.database.tables import SessionRow, TurnRow
from proxy.dialects import endpoints as chat_endpoints
from proxy.dialects.messages import endpoints as messages_endpoints
from proxy.dialects.responses import endpoints as responses_endpoints
from proxy.engines.place import EnginePlace
from proxy.engines.protocol import Engine, GenerateRequest
from proxy.errors import ModelNotFound
from proxy.http import errors
from proxy.http.routes import add_routes
from proxy.http.services import provide, service
from proxy.runs.service import RunView
from proxy.sessions import endpoints as session_endpoints
from proxy.sessions.service import SessionService
from proxy.settings import DatabaseSettings, EngineSettings, ProviderSettings, RunSettings, ServerSettings, Settings
from proxy.tokens.template import ChatTemplate
from proxy.turns.service import TrajectoryStore
from proxy.versions.answer_pairs import AnswerPairs
from tests.database import sqlite_database
from tests.fakes.engine import FakeEngine
from tests.fakes.load import new_load
from tests.proxy.store import Store, open_store
from tests.running_app import bearer

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"a":  17, "b": 25, "op": "+"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
USER: Any = {"role": "user", "content": "What is 17 + 25?"}


class FakeSwaps:
    """Serving as a test sets it: `version` of every run, on the run's engine in `engines` or else on `engine`.
    `spare` is another engine of every run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.engines: dict[str, Engine] = {}
        self.spare: Engine | None = None
        self.older: dict[int, Engine] = {}
        """Engines that older versions can be asked of."""
        self.version: int | None = 0
        self.candidate: int | None = None
        """The version that answers prompts unseen, at its engine in `older`."""
        self.rechecks = 0
        self.places: dict[int, EnginePlace] = {}
        self.concurrency = 64

    def recheck_engine(self, engine: Engine) -> None:
        assert engine
        self.rechecks += 1

    def serving(self, run_id: RunId) -> int | None:
        assert run_id
        return self.version

    def find_place(self, run_id: RunId, session_id: str | None = None) -> EnginePlace | None:
        return None if self.version is None else self.place_at(self.engines.get(run_id, self.engine))

    def track(self, run_id: RunId, session_id: str, key_id: str) -> None:
        return None

    def shadow(self, run_id: RunId) -> int | None:
        return self.candidate

    def another_place(self, run_id: RunId, lost: EnginePlace) -> EnginePlace | None:
        return self.place_at(self.spare) if self.spare is not None and lost.engine is not self.spare else None

    async def require_version(self, run: RunView, version: int) -> None:
        if version not in self.older:
            raise ModelNotFound(f"version {version} of the run {run.name!r} cannot be served", param="model")

    async def older_place(self, run: RunView, version: int, session_id: str) -> EnginePlace:
        assert run.id, session_id
        return self.place_at(self.older[version])

    def unserved_reason(self, run: RunView) -> str:
        return f"no engine serves the run {run.name!r} now"

    def place_at(self, engine: Engine) -> EnginePlace:
        """The engine's one place, with the work under way there."""
        return self.places.setdefault(id(engine), EnginePlace(engine, new_load(self.concurrency)))


class SeenTurns:
    """An observer that stores the events it gets."""

    def __init__(self) -> None:
        self.turns: list[tuple[Turn, str]] = []
        self.redacted = 0
        self.dialects: list[str] = []
        self.unrecorded: list[tuple[str, str]] = []
        self.dropped: list[str] = []
        self.outcomes: list[str] = []
        """Those of candidates' answers that nobody sees."""

    def shadow_dropped(self, *, reason: str) -> None:
        self.dropped.append(reason)

    def candidate_answered(self, *, outcome: str) -> None:
        self.outcomes.append(outcome)

    def call_unrecorded(self, *, reason: str, dialect: str) -> None:
        self.unrecorded.append((reason, dialect))

    def tokens_redacted(self, tokens: int) -> None:
        self.redacted += tokens

    def turn_finished(self, turn: Turn, *, attributed_by: str, prompt_tokens: int, dialect: str) -> None:
        assert prompt_tokens == turn.prefix_tokens + len(turn.prompt_ids)
        self.dialects.append(dialect)
        self.turns.append((turn, attributed_by))


@dataclass
class World:
    """`key` is a run key, which `http` sends. `templates` are those of all base models, by name. `say` sets the
    engine's next answers, in order; the last one is repeated."""

    store: Store
    trajectories: TrajectoryStore
    template: ChatTemplate
    templates: dict[str, ChatTemplate]
    engine: FakeEngine
    swaps: FakeSwaps
    seen: SeenTurns
    app: FastAPI
    key: str
    http: httpx.AsyncClient
    answers: list[list[int]] = field(default_factory=list)

    def say(self, *texts: str, stop: bool = True) -> None:
        ending = [self.template.stop_ids[0]] if stop else []
        self.answers[:] = [[*self.template.encode(text), *ending] for text in texts]

    def set_version(self, version: int) -> None:
        self.swaps.version = version
        self.engine.label = weight_label(self.store.run.id, version)

    @property
    def calls(self) -> CallService:
        return service({"app": self.app}, CallService)

    def restart(self) -> None:
        """Continue with a proxy that has only the store, like another process."""
        store = self.store
        self.trajectories = TrajectoryStore(database=store.database, clock=store.clock, signals=store.signals)
        sessions = SessionService(store.database, store.runs, store.credentials, store.signals, store.clock)
        settings = service({"app": self.app}, Settings)
        provide(
            self.app,
            call_service(store, settings, self.templates, self.swaps, self.seen, sessions, self.trajectories),
        )

    async def post(self, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        dashed = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(path, json={"model": "policy", "messages": [USER], **body}, headers=dashed)

    async def session_key(self, **spec: Any) -> tuple[str, str]:
        """Return a new session's id and key."""
        created = (await self.http.post("/v1/sessions", json=spec)).json()
        return created["id"], created["api_key"]

    async def turns(self) -> list[Any]:
        """Return all recorded turns, oldest first."""
        return await self.store.database.read(
            lambda connection: list(connection.execute(select(TurnRow.__table__).order_by(TurnRow.id)).all())
        )

    async def sessions(self) -> list[Any]:
        return await self.store.database.read(
            lambda connection: list(connection.execute(select(SessionRow.__table__).order_by(SessionRow.id)).all())
        )

    @asynccontextmanager
    async def sdk(self, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        """Return the real SDK on a real connection."""
        async with (
            listening(self.app) as address,
            openai.AsyncOpenAI(api_key=self.key, base_url=f"{address}/v1", **{"max_retries": 0, **options}) as client,
        ):
            yield client


def call_service(
    store: Store,
    settings: Settings,
    templates: Mapping[str, ChatTemplate],
    swaps: FakeSwaps,
    seen: SeenTurns,
    sessions: SessionService,
    trajectories: TrajectoryStore,
) -> CallService:
    """Return the service of model calls on this store; `templates` are those of the base models, by name."""

    def load_template(model: str, *, allow_control_tokens: bool) -> ChatTemplate:
        assert not allow_control_tokens
        return templates[model]

    return CallService(
        settings=settings,
        runs=store.runs,
        sessions=sessions,
        trajectories=trajectories,
        pairs=AnswerPairs(database=store.database, signals=store.signals, clock=store.clock),
        swaps=swaps,
        clock=store.clock,
        observer=seen,
        limits=store.limits,
        load_template=load_template,
    )


def output_ids(turn: Any) -> list[int]:
    return list(unpack_ids(turn.output_ids))


@asynccontextmanager
async def open_world(
    directory: Path,
    template: ChatTemplate,
    run: dict[str, Any] | None = None,
    *,
    ping_seconds: float = 15.0,
    concurrency: int = 64,
    serving: Engine | None = None,
    url: str | None = None,
    when_unavailable: Literal["refuse", "serve"] = "refuse",
) -> AsyncIterator[World]:
    """Open a world. `serving` is a real engine that answers instead of the script; `url` a store other than SQLite in
    the directory."""
    settings = RunSettings(name="policy", model="base/model", **(run or {}))
    outlive_store = when_unavailable == "serve"
    async with open_store(url or sqlite_database(directory), settings, outlive_store=outlive_store) as store:
        answers: list[list[int]] = []

        def script(_request: GenerateRequest) -> list[int]:
            return answers.pop(0) if len(answers) > 1 else answers[0]

        engine = FakeEngine(script, label=weight_label(store.run.id, 0))
        if serving is not None:
            await serving.label_weights(engine.label)
        trajectories = TrajectoryStore(database=store.database, clock=store.clock, signals=store.signals)
        swaps, seen, app = FakeSwaps(serving or engine), SeenTurns(), FastAPI()
        swaps.concurrency = concurrency
        configured = Settings(
            server=ServerSettings(stream_ping_seconds=ping_seconds),
            engine=EngineSettings(max_concurrency=concurrency),
            run=settings,
            database=DatabaseSettings(when_unavailable=when_unavailable),
            providers={"house": ProviderSettings(base_url="http://house.test/v1")},
        )
        templates = {store.run.base_model: template}
        calls = call_service(store, configured, templates, swaps, seen, store.sessions, trajectories)
        provide(app, configured, calls, store.database, store.runs, store.credentials, store.sessions)
        errors.install(app)
        add_routes(
            app,
            session_endpoints.router,
            chat_endpoints.router,
            messages_endpoints.router,
            responses_endpoints.router,
        )
        key = await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://proxy.test", headers=bearer(key.text)
        ) as client:
            parts = (store, trajectories, template, templates, engine, swaps, seen, app)
            world = World(*parts, key.text, client, answers)
            world.say("The answer is 42.")
            yield world
            await service({"app": app}, CallService).aclose()


@asynccontextmanager
async def listening(app: Starlette) -> AsyncIterator[str]:
    """Serve the application on a free port for tests that need a real connection, and yield its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, ws="none"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until the condition holds; the test's time-out bounds it."""
    while not condition():
        await asyncio.sleep(0.001)
