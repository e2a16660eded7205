"""PlainRoutes answers like the framework."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from proxy.dialects import endpoints
from proxy.dialects.messages import endpoints as messages_endpoints
from proxy.dialects.responses import endpoints as responses_endpoints
from proxy.errors import Conflict
from proxy.http import errors
from proxy.http.boundary import RequestBoundary
from proxy.http.plain_routes import PlainRoutes
from tests.proxy.http.test_boundary import LIMIT, Recorder, bound_bodies


async def plain(request: Request) -> JSONResponse:
    body = (await request.body()).decode()
    if body == "conflict":
        raise Conflict("no")
    if body == "bug":
        raise RuntimeError("secret")
    seen = inspect.stack()
    return JSONResponse(
        {
            "parameters": request.path_params,
            "query": dict(request.query_params),
            "body": body,
            "app": request.app.title,
            "short": not any("fastapi/routing" in frame.filename for frame in seen),
        }
    )


async def named(request: Request, name: str) -> JSONResponse:
    return JSONResponse({"name": name, "path": request.url.path})


def application(*, short: bool) -> FastAPI:
    router = APIRouter()
    for path in ("/v1/plain", "/of/{session}/plain", "/of/{session}/deep/{rest:path}/plain"):
        router.add_api_route(path, plain, methods=["POST"])
    router.add_api_route("/named/{name}/plain", named, methods=["POST"])
    router.add_api_route("/both", plain, methods=["GET", "POST"])
    app = FastAPI(title="the app")
    if short:
        app.add_middleware(PlainRoutes, routers=(router,))
    bound_bodies(app)
    app.add_middleware(RequestBoundary, observer=Recorder())
    errors.install(app)
    app.include_router(router)
    return app


@pytest.fixture(params=[True, False], ids=["short", "framework"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=application(short=request.param))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.test") as opened:
        yield opened


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/v1/plain?a=b", {}),
        ("/of/me/plain?a=b", {"session": "me"}),
        ("/of/m%20e/plain?a=b", {"session": "m e"}),
        ("/of/me/deep/er/still/plain?a=b", {"session": "me", "rest": "er/still"}),
        ("/both?a=b", {}),
    ],
)
async def test_plain_routes_answer_like_the_framework(
    client: httpx.AsyncClient, path: str, parameters: dict[str, str]
) -> None:
    answer = await client.post(path, content=b"text")
    answered = answer.json()
    assert (answer.status_code, answered["parameters"], answered["query"], answered["body"], answered["app"]) == (
        200,
        parameters,
        {"a": "b"},
        "text",
        "the app",
    )
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/v1/plain", b"conflict", 409, "conflict"),
        ("POST", "/v1/plain", b"bug", 500, None),
        ("POST", "/v1/plain", b"x" * (LIMIT + 1), 413, "payload_too_large"),
        ("POST", "/of/a/b/plain", b"", 404, "not_found"),
        ("POST", "/of//plain", b"", 404, "not_found"),
        ("POST", "/nothing", b"", 404, "not_found"),
        ("GET", "/v1/plain", b"", 405, "method_not_allowed"),
    ],
)
async def test_plain_routes_refuse_like_the_framework(
    client: httpx.AsyncClient, method: str, path: str, content: bytes, status: int, code: str | None
) -> None:
    answer = await client.request(method, path, content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_endpoints_with_parameters_are_left_to_the_framework(client: httpx.AsyncClient) -> None:
    assert (await client.post("/named/x/plain")).json() == {"name": "x", "path": "/named/x/plain"}


async def test_plain_routes_bypass_the_framework() -> None:
    async def ask(short: bool, path: str) -> bool:
        transport = httpx.ASGITransport(app=application(short=short))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy.test") as client:
            return bool((await client.post(path)).json()["short"])

    assert [await ask(True, path) for path in ("/v1/plain", "/of/me/plain", "/both")] == [True, True, False]
    assert not await ask(False, "/v1/plain")


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/sessions/x/chat/completions"]
)
async def test_every_dialect_has_a_plain_route(path: str) -> None:
    async def framework(scope: Any, receive: Any, send: Any) -> None:
        pytest.fail(f"the framework was asked for {scope['path']}, {receive}, {send}")

    routes = PlainRoutes(framework, (endpoints.router, messages_endpoints.router, responses_endpoints.router))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=routes), base_url="http://proxy.test") as client:
        with suppress(LookupError):  # of an endpoint that was reached: no services are provided here
            assert (await client.post(path)).status_code == 401
