"""JSON bodies of endpoints that are not model calls."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from proxy.http import body, errors
from proxy.http.body import MOST_BYTES, MOST_VALUES, json_body
from proxy.http.json_size import has_more_values


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    errors.install(app)

    @app.post("/")
    async def post(request: Request) -> dict[str, Any]:
        return {"read": len(await json_body(request))}

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.test") as opened:
        yield opened


async def test_long_bodies_are_decoded_on_a_thread(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def recording(text: bytes, most: int) -> bool:  # counting values is the first step of decoding
        threads.append(threading.get_ident())
        return has_more_values(text, most)

    monkeypatch.setattr(body, "has_more_values", recording)
    for text in ("a", "a" * 200_000):
        assert (await client.post("/", json=[text])).json() == {"read": 1}
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


async def test_too_many_values_are_not_decoded(client: httpx.AsyncClient) -> None:
    answer = await client.post("/", content=b"[" + b",".join([b"[]"] * MOST_VALUES) + b"]")
    assert answer.status_code == 400
    assert f"more than {MOST_VALUES} JSON values" in answer.json()["error"]["message"]


async def test_too_many_bytes_are_413(client: httpx.AsyncClient) -> None:
    answer = await client.post("/", content=b'"' + b"a" * MOST_BYTES + b'"')
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
