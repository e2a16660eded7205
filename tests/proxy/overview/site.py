"""The operating API and the admin page over a store of their own, without the rest of the proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from sqlalchemy import Connection, Engine, event

from proxy.admin import endpoints as admin_endpoints
from proxy.admin.sign_in import SignIn
from proxy.auth.service import Credentials, PrincipalKind
from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.feedback.service import FeedbackService
from proxy.http import errors
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.keys import endpoints as key_endpoints
from proxy.lifecycle.signals import Signals
from proxy.overview import endpoints as overview_endpoints
from proxy.overview import event_endpoints, run_endpoints
from proxy.overview.rewards import endpoints as ledger_endpoints
from proxy.overview.service import OverviewService
from proxy.overview.views import EngineView
from proxy.projects.service import ProjectDirectory
from proxy.runs.service import RunDirectory
from proxy.runs.switch import RunSwitch
from proxy.settings import load_settings
from proxy.usage.service import UsageService

ORIGIN = "http://proxy.test"
SECRET = b"s" * 32


class Serving:
    """A stand-in for the pool of engines, as far as the overview uses it."""

    def __init__(self) -> None:
        self.ready = True
        self.lines: list[str] = []
        self.engines: tuple[EngineView, ...] = ()

    def views(self) -> tuple[EngineView, ...]:
        return self.engines

    def problems(self) -> list[str]:
        return self.lines


class Site(msgspec.Struct):
    """The application, with its parts that tests change. `client` sends no key."""

    app: FastAPI
    database: Database
    signals: Signals
    credentials: Credentials
    overview: OverviewService
    switch: RunSwitch
    serving: Serving
    client: httpx.AsyncClient

    async def key(self, kind: PrincipalKind, run_id: str | None = None) -> dict[str, str]:
        """Return the header of a new key."""
        made = await self.credentials.create(kind, run_id=run_id)
        return {"authorization": f"Bearer {made.text}"}


async def one_text(_run_id: str) -> Callable[[int], str]:
    """Return a tokenizer whose ids are characters."""
    return chr


@asynccontextmanager
async def open_site(url: str, directory: Path, clock: Clock) -> AsyncIterator[Site]:
    """Open a site over the migrated database `url` (`tests.database`); `directory` is the data directory."""
    database = Database(url)
    site = build_site(database, directory, clock)
    try:
        yield site
    finally:
        site.overview.close()
        await site.client.aclose()
        await database.aclose()


def build_site(database: Database, directory: Path, clock: Clock) -> Site:
    """Open a site over existing tables."""
    app = FastAPI()
    signals, serving = Signals(), Serving()
    credentials = Credentials(database, SECRET, clock)
    overview = OverviewService(
        database=database,
        clock=clock,
        signals=signals,
        engines=serving,
        data_dir=directory,
        token_text=one_text,
        hold_seconds=0.0,
    )
    sign_in = SignIn(secret=SECRET, clock=clock, credentials=credentials, database=database)
    switch = RunSwitch(database, signals, clock)
    runs, projects = RunDirectory(database, clock), ProjectDirectory(database, signals, clock)
    provide(
        app,
        overview,
        runs,
        switch,
        credentials,
        sign_in,
        FeedbackService(database, signals, clock),
        load_settings(),
        projects,
        UsageService(database, runs, projects, credentials, clock),
    )
    errors.install(app)
    add_routes(
        app,
        overview_endpoints.router,
        run_endpoints.router,
        event_endpoints.router,
        key_endpoints.router,
        ledger_endpoints.router,
        admin_endpoints.router,
    )
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=ORIGIN)
    return Site(
        app=app,
        database=database,
        signals=signals,
        credentials=credentials,
        overview=overview,
        switch=switch,
        serving=serving,
        client=client,
    )


async def plan_of(site: Site, asked: Callable[[], Awaitable[object]], about: str) -> str:
    """Return SQLite's plan of the first statement run by `asked` that contains these words."""
    seen: list[tuple[str, Any]] = []

    def note(connection: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        # The listener gets statements of every engine in the process: proxies of other tests may still sweep their
        # stores.
        if connection.engine.url.database == site.database.url.database:
            seen.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        await asked()
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    statement, parameters = next((text, values) for text, values in seen if about in text)

    def work(connection: Connection) -> str:
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        return "\n".join(row[-1] for row in rows)

    return await site.database.read(work)
