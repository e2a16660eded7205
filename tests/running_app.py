"""Run an application in the test's own event loop: lifespan, then a client that talks to it without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI


@asynccontextmanager
async def running(app: FastAPI, *, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the started application; `key` is sent with every request."""
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy.test", headers=headers) as client:
            yield client


async def until_ready(client: httpx.AsyncClient) -> None:
    """Wait until model calls are served; the test's time-out bounds it."""
    while (await client.get("/readyz")).status_code != 200:
        await asyncio.sleep(0.01)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
