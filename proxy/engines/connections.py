"""HTTP connections for many calls at once to one engine."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

LANE_SIZE = 16
"""Connections in one httpx client. Its pool compares every idle connection with every other one at each call, which
at 64 costs more than a short generation does."""

KEEPALIVE_SECONDS = 4.0
"""Less than uvicorn's five: a connection that the engine is just closing must not be used."""


class _Lane:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.calls = 0


class Connections:
    """Up to `limit` calls at once, spread over clients of few connections each; further calls wait."""

    def __init__(self, url: str, *, limit: int, timeout: httpx.Timeout) -> None:
        self._url = url
        self._timeout = timeout
        self._slots = asyncio.Semaphore(limit)
        self._lanes: list[_Lane] = []
        # One for all clients: building it reads the system's certificates, which takes longer than a call.
        self._tls: ssl.SSLContext | bool = httpx.create_ssl_context() if url.startswith("https:") else False

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client with a free connection, for one call."""
        async with self._slots:
            lane = self._free_lane()
            lane.calls += 1
            try:
                yield lane.client
            finally:
                lane.calls -= 1

    async def aclose(self) -> None:
        for lane in self._lanes:
            await lane.client.aclose()

    def _free_lane(self) -> _Lane:
        for lane in self._lanes:
            if lane.calls < LANE_SIZE:
                return lane
        client = httpx.AsyncClient(
            base_url=self._url,
            timeout=self._timeout,
            limits=httpx.Limits(
                max_connections=LANE_SIZE, max_keepalive_connections=LANE_SIZE, keepalive_expiry=KEEPALIVE_SECONDS
            ),
            verify=self._tls,
            trust_env=False,
        )
        self._lanes.append(_Lane(client))
        return self._lanes[-1]
