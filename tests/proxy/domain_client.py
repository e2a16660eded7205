"""Sessions and feedback over HTTP on a real store, without an engine or a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from fastapi import FastAPI

from proxy.auth.service import PrincipalKind
from proxy.feedback import endpoints as feedback_endpoints
from proxy.http import errors
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.sessions import endpoints as session_endpoints
from proxy.settings import Settings
from tests.proxy.store import Store
from tests.running_app import bearer


@dataclass
class DomainClient:
    """`http` sends the key of `store.owner`'s run."""

    http: httpx.AsyncClient
    store: Store


@asynccontextmanager
async def open_domain(store: Store) -> AsyncIterator[DomainClient]:
    app = FastAPI()
    provide(app, Settings(), store.runs, store.credentials, store.sessions, store.feedback)
    errors.install(app)
    add_routes(app, session_endpoints.router, feedback_endpoints.router)
    key = await store.credentials.create(PrincipalKind.RUN, run_id=store.run.id)
    transport = httpx.ASGITransport(app=app)
    headers = bearer(key.text)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.test", headers=headers) as client:
        yield DomainClient(http=client, store=store)
