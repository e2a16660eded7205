"""A real server on a free port, for streams and browsers, which a transport without sockets cannot test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette

from tests.proxy.overview.site import Site


@asynccontextmanager
async def serving(site: Site) -> AsyncIterator[str]:
    """Yield the site's address."""
    async with serving_app(site.app) as address:
        try:
            yield address
        finally:
            site.overview.close()


@asynccontextmanager
async def serving_app(app: Starlette) -> AsyncIterator[str]:
    """Yield the address of an application that has been started."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
