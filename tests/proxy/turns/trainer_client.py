"""A client of the trainer's HTTP API on a world's store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

from proxy.auth.service import Credentials, PrincipalKind
from proxy.claims import endpoints as trajectory_endpoints
from proxy.claims.service import ClaimService
from proxy.contract.claim import MEDIA_TYPE, ClaimedBatch, ClaimRequest, decode, encode
from proxy.http import errors
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.runs.served import ServedRuns
from proxy.runs.service import RunView
from proxy.steps import endpoints as step_endpoints
from proxy.steps.service import StepService
from proxy.versions import endpoints as policy_endpoints
from proxy.versions import steering_endpoints
from proxy.versions.retention import WeightRetention
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import steering_of, versions_of

_Message = TypeVar("_Message")


class TrainerClient:
    """Sends the trainer key of the world's run by default."""

    def __init__(self, world: World, http: httpx.AsyncClient, credentials: Credentials, claims: ClaimService) -> None:
        self.world = world
        self.http = http
        self.claims = claims
        self._credentials = credentials

    async def key(self, kind: PrincipalKind, *, run_id: str | None = None) -> dict[str, str]:
        """Return headers with a new key."""
        return {"authorization": f"Bearer {(await self._credentials.create(kind, run_id=run_id)).text}"}

    async def post(self, path: str, message: Any = None, **options: Any) -> httpx.Response:
        content = b"" if message is None else message if isinstance(message, bytes) else encode(message)
        return await self.http.post(f"/api/v1/runs/policy{path}", content=content, **options)

    async def claim(self, **wish: Any) -> ClaimedBatch:
        return read(await self.post("/claims", ClaimRequest(**{"trainer": "t", "want": 1, **wish})), ClaimedBatch)


def read(response: httpx.Response, kind: type[_Message]) -> _Message:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    return decode(response.content, kind)


async def _context_length(_run: RunView) -> int:
    return 32_768


@asynccontextmanager
async def open_trainer(world: World) -> AsyncIterator[TrainerClient]:
    app = FastAPI()
    credentials = Credentials(world.database, b"s" * 32, world.clock)
    claims = ClaimService(database=world.database, clock=world.clock, signals=world.signals)
    provide(
        app,
        world.runs,
        credentials,
        claims,
        StepService(database=world.database),
        WeightRetention(database=world.database, clock=world.clock, signals=world.signals),
        steering_of(world),
        versions_of(world),
        ServedRuns(
            first_run=world.run,
            is_placed=world.run_id.__eq__,
            context_length=_context_length,
            weight_formats=lambda _run_id: None,
        ),
    )
    errors.install(app)
    add_routes(app, trajectory_endpoints.router, step_endpoints.router)
    add_routes(app, policy_endpoints.router, steering_endpoints.router)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy.test") as http:
        client = TrainerClient(world, http, credentials, claims)
        http.headers.update(await client.key(PrincipalKind.TRAINER, run_id=world.run_id))
        yield client
