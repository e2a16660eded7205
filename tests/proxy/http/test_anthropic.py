"""Errors in Anthropic's envelope: for every request of its clients, whatever refuses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from proxy import errors as all_errors
from proxy.errors import BaseRlError
from proxy.http import errors
from proxy.http.anthropic import anthropic_envelope
from proxy.http.boundary import RequestBoundary
from tests.proxy.http.test_boundary import LIMIT, Recorder, bound_bodies

OURS = [kind for kind in vars(all_errors).values() if isinstance(kind, type) and issubclass(kind, BaseRlError)]
KINDS = {
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "conflict_error",
    "request_too_large", "timeout_error", "api_error", "overloaded_error",
    "rate_limit_error",
}  # fmt: skip


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    bound_bodies(app)
    app.add_middleware(RequestBoundary, observer=Recorder())
    errors.install(app)

    @app.post("/v1/messages")
    async def messages(number: int) -> int:
        if number == 0:
            raise all_errors.EngineUnavailable("no engine")
        if number == 1:
            raise RuntimeError("secret detail")
        return number

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.test") as opened:
        yield opened


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] in KINDS
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("query", "body", "status", "kind"),
    [
        ("?number=0", b"", 503, "overloaded_error"),
        ("?number=1", b"", 500, "api_error"),
        ("?number=x", b"", 400, "invalid_request_error"),
        ("?number=2", b"x" * (LIMIT + 1), 413, "request_too_large"),
        ("/batches", b"", 404, "not_found_error"),
    ],
)
async def test_every_error_below_messages_has_anthropics_envelope(
    client: httpx.AsyncClient, query: str, body: bytes, status: int, kind: str
) -> None:
    answer = await client.post(f"/v1/messages{query}", content=body)
    assert (answer.status_code, error_of(answer)["type"]) == (status, kind)


async def test_a_wrong_method_has_anthropics_envelope(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/messages")
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("path", ["/messages/x", "/sessions/a/v1/messages/x", "/sessions/a/messages/x"])
async def test_every_prefix_has_anthropics_envelope(client: httpx.AsyncClient, path: str) -> None:
    assert error_of(await client.post(path))["type"] == "not_found_error"


async def test_anthropics_clients_are_recognised_everywhere_by_their_header(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/files", headers={"anthropic-version": "2023-06-01"})
    assert error_of(answer)["type"] == "not_found_error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages2", "/messagesx", "/x/messages"])
async def test_other_clients_get_openais_envelope(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path)
    assert set(answer.json()) == {"error"}
    assert "request-id" not in answer.headers


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_type_of_anthropics(kind: type[BaseRlError]) -> None:
    assert anthropic_envelope(kind("x").envelope())["error"]["type"] in KINDS
