"""An HTTP/1.1 client for one engine: a pool of persistent connections.

A general client costs more CPU for a short generation than everything else that the proxy does for it
(docs/decisions/0010). This one has no redirects, cookies, compression or proxies from the environment, which no
engine needs.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import Callable
from typing import Self
from urllib.parse import SplitResult, unquote, urlsplit

import httpx

from proxy.engines.connection import Connection, lost_connection
from proxy.errors import EngineTimeout, EngineUnavailable, InvalidEngineReply

KEEPALIVE_SECONDS = 4.0
"""How long an idle connection is reused: less than the five seconds after which uvicorn closes it."""

LARGEST_BODY = 16 << 20
"""Most bytes of an answer other than a generation; SGLang's description of itself has some 20 KB."""

_PORTS = {"http": 80, "https": 443}


class Connections:
    """A pool of connections for up to `limit` requests at once; further ones wait. A path in `url` is put before the
    path of every request.

    While `is_excused` returns True, silence is expected and has no bound. Raises ValueError for an invalid `url`.
    """

    def __init__(
        self,
        url: str,
        *,
        limit: int,
        connect_seconds: float,
        silence_seconds: float,
        is_excused: Callable[[], bool] = lambda: False,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// address")
        self._host, self._port = parts.hostname, parts.port or _PORTS[parts.scheme]
        self._tls: ssl.SSLContext | None = httpx.create_ssl_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._headers = _headers(parts)
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._is_excused = is_excused
        self._slots = asyncio.Semaphore(limit)
        self._open: set[Connection] = set()
        self._idle: deque[Connection] = deque()
        self._suspended: str | None = None

    @property
    def idle(self) -> int:
        """The number of idle connections, ready for the next requests."""
        return len(self._idle)

    async def request(
        self, method: str, path: str, body: bytes = b"", *, silence_seconds: float | None = None
    ) -> Reply:
        """Send a request and return its reply as soon as the head has arrived; the caller closes the reply.

        `silence_seconds` is the longest time without a byte, here and while the body is read. Raises
        EngineUnavailable if there is no connection or it is lost, EngineTimeout.
        """
        line = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        message = line.encode() + body
        silence = self._silence_seconds if silence_seconds is None else silence_seconds
        await self._slots.acquire()
        try:
            self._check_suspended()
            idle = self._take_idle()
            if idle is not None and await idle.exchange(message, silence):
                return Reply(self, idle)
            # No connection was idle, or the engine closed it without an answer: it cannot have taken the request, so
            # one repetition is safe.
            fresh = await self._connect()
            # Again: `suspend` may have come while the connection was made, and it closes open connections only.
            if self._suspended is not None:
                fresh.close()
            self._check_suspended()
            if await fresh.exchange(message, silence):
                return Reply(self, fresh)
            raise lost_connection("it was closed without an answer")
        except BaseException:
            self._slots.release()  # with a reply, `take_back` releases the slot
            raise

    def suspend(self, reason: str) -> None:
        """Fail every running exchange with EngineTimeout; further ones raise EngineUnavailable."""
        self._suspended = reason
        self._idle.clear()
        for connection in list(self._open):
            connection.fail(EngineTimeout(reason))

    def restore(self) -> None:
        """Accept requests again after `suspend`."""
        self._suspended = None

    def _check_suspended(self) -> None:
        if self._suspended is not None:
            raise EngineUnavailable(self._suspended)

    async def aclose(self) -> None:
        """Close all connections."""
        connections = list(self._open)
        for connection in connections:
            connection.close()
        await asyncio.gather(*(connection.lost for connection in connections))

    def take_back(self, connection: Connection, *, runs_out: bool) -> None:
        """Release a connection, which is reused if its reply was read to the end, or once that `runs_out`."""
        self._slots.release()
        if connection.is_reusable:
            self._keep(connection)
        elif runs_out:
            connection.run_out(self._keep)
        else:
            connection.close()

    def _keep(self, connection: Connection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def _take_idle(self) -> Connection | None:
        """Return the connection that was used last, so that the surplus after a burst grows old and is closed."""
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_SECONDS
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self._open, self._is_excused), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise EngineUnavailable("the engine cannot be reached: it accepts no connection") from error
        except (OSError, UnicodeError) as error:  # a host name that cannot be encoded
            raise EngineUnavailable(f"the engine cannot be reached: {error or type(error).__name__}") from error
        return connection


class Reply:
    """An answer whose body is still to be read, by `read`, or by `part` until it returns nothing. `close` it.

    A body that is not read to its end costs the connection, unless the caller sets `runs_out`: only the end is
    missing.
    """

    def __init__(self, connections: Connections, connection: Connection) -> None:
        self._connections = connections
        self._connection: Connection | None = connection
        self.status = connection.status
        self.runs_out = False

    async def read(self, limit: int = LARGEST_BODY) -> bytes:
        """Return the whole body. Raises like `part`, and InvalidEngineReply for more than `limit` bytes."""
        parts, size = [], 0
        while part := await self.part():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise InvalidEngineReply(f"it has more than {limit} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def part(self) -> bytes:
        """Return the bytes of the body since the last call, after waiting for some; empty at the end.

        Raises EngineUnavailable if the connection is lost before the end, EngineTimeout.
        """
        assert self._connection is not None, "the reply is closed"
        return await self._connection.part()

    def bound_silence(self, seconds: float) -> None:
        """Replace the request's bound on silence by `seconds` from now on."""
        if self._connection is not None:
            self._connection.bound_silence(seconds)

    def close(self) -> None:
        """Release the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._connections.take_back(connection, runs_out=self.runs_out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _headers(url: SplitResult) -> str:
    host = url.netloc.rpartition("@")[2]
    headers = f"host: {host}\r\nuser-agent: base-rl\r\naccept: */*\r\ncontent-type: application/json\r\n"
    if url.username is not None:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
        headers += f"authorization: Basic {base64.b64encode(pair.encode()).decode()}\r\n"
    return headers
