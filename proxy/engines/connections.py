"""An HTTP/1.1 client for one engine: persistent connections, one request at a time on each, parsed by httptools.

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
from typing import Self, cast
from urllib.parse import SplitResult, unquote, urlsplit

import httptools
import httpx

from proxy.errors import BaseRlError, EngineTimeout, EngineUnavailable, InvalidEngineReply

KEEPALIVE_SECONDS = 4.0
"""How long an idle connection is reused: less than the five seconds after which uvicorn closes it."""

# Longest wait for the end of a body whose content is complete already.
_RUN_OUT_SECONDS = 1.0

LARGEST_BODY = 16 << 20
"""Most bytes of an answer other than a generation; SGLang's description of itself has some 20 KB."""

# Bytes that a slow reader may leave untaken; beyond this bound the socket is not read, which bounds the memory.
_UNREAD_BYTES = 1 << 20

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
        self._open: set[_Connection] = set()
        self._idle: deque[_Connection] = deque()
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
            raise _lost("it was closed without an answer")
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

    def take_back(self, connection: _Connection, *, runs_out: bool) -> None:
        """Release a connection, which is reused if its reply was read to the end, or once that `runs_out`."""
        self._slots.release()
        if connection.is_reusable:
            self._keep(connection)
        elif runs_out:
            connection.run_out(self._keep)
        else:
            connection.close()

    def _keep(self, connection: _Connection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def _take_idle(self) -> _Connection | None:
        """Return the connection that was used last, so that the surplus after a burst grows old and is closed."""
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_SECONDS
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._open, self._is_excused), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise EngineUnavailable("the engine cannot be reached: it accepts no connection") from error
        except OSError as error:
            raise EngineUnavailable(f"the engine cannot be reached: {error or type(error).__name__}") from error
        return connection


class Reply:
    """An answer whose body is still to be read, by `read`, or by `part` until it returns nothing. `close` it.

    A body that is not read to its end costs the connection, unless the caller sets `runs_out`: only the end is
    missing.
    """

    def __init__(self, connections: Connections, connection: _Connection) -> None:
        self._connections = connections
        self._connection: _Connection | None = connection
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


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time. The parser calls the `on_` methods during `feed_data`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, among: set[_Connection], is_excused: Callable[[], bool]
    ) -> None:
        self._loop = loop
        self._is_excused = is_excused
        self._among = among
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._silence_seconds = 0.0
        self._heard_at: float | None = None
        self._failure: BaseRlError | None = None
        self._keep: Callable[[_Connection], None] | None = None
        self._has_head = self._is_framed = self._is_whole = False
        self._keeps_alive = self._closed = self._paused = False
        self._parts: list[bytes] = []
        self._unread = 0
        self.lost: asyncio.Future[None] = loop.create_future()
        self.status = 0
        self.idle_since = 0.0

    @property
    def is_reusable(self) -> bool:
        return self._is_whole and self._keeps_alive and not self._closed and not self._parts

    async def exchange(self, message: bytes, silence_seconds: float) -> bool:
        """Send a request and wait for the head of its answer; return False if the connection closed before that."""
        self._heard_at = None
        self._has_head = self._is_framed = self._is_whole = False
        self._sent_at = self._loop.time()
        self._silence_seconds = silence_seconds
        self._silence = self._loop.call_later(silence_seconds, self._check_silence)
        self._transport.write(message)
        try:
            while not self._has_head:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    return False
                await self._wait()
        except BaseException:
            self.close()
            raise
        return True

    async def part(self) -> bytes:
        while not self._parts:
            if self._is_whole:
                return b""
            if self._failure is not None:
                raise self._failure
            await self._wait()
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._unread = 0
        if self._paused and not self._closed:
            self._paused = False
            self._transport.resume_reading()
        return part

    def bound_silence(self, seconds: float) -> None:
        if self._silence is not None:
            self._stop_timer()
            self._silence_seconds = seconds
            self._silence = self._loop.call_later(seconds, self._check_silence)

    def run_out(self, keep: Callable[[_Connection], None]) -> None:
        """Pass the connection to `keep` if its answer ends soon; close it otherwise."""
        if self._closed or self._failure is not None:
            return
        self._keep = keep
        self._stop_timer()
        self._silence = self._loop.call_later(_RUN_OUT_SECONDS, self.close)

    def close(self) -> None:
        self._keep = None
        self._stop_timer()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._among.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._among.discard(self)
        self._closed = True
        self.lost.set_result(None)
        if exc is None and self._failure is None and self._has_head and not self._is_framed:
            self._end()  # a body without a length ends with its connection
        elif not self._is_whole and self._heard_at is not None and self._failure is None:
            self._failure = _lost(str(exc) if exc is not None else "it was closed in the middle of an answer")
        self._stop_timer()
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._is_whole:  # bytes without a request
            self.close()
            return
        self._heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(_lost(f"the answer is not HTTP ({error})"))
            return
        if self._unread > _UNREAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise ValueError("an answer without a request")

    def on_header(self, name: bytes, _value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._keeps_alive = self._parser.should_keep_alive()
        self._has_head = self.status >= 200  # 1xx only announce the answer

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._unread += len(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._end()

    def _end(self) -> None:
        self._is_whole = True
        self._stop_timer()
        keep, self._keep = self._keep, None
        if keep is not None and self._keeps_alive and not self._closed:
            self._parts.clear()
            keep(self)

    def fail(self, failure: BaseRlError) -> None:
        """Close the connection and raise the failure in whoever waits for it."""
        self._failure = failure
        self.close()
        self._wake()

    def _check_silence(self) -> None:
        # One timer per exchange. Bytes only record their time and do not move it, which would cost a timer each; when
        # it fires, it is set again for the rest.
        since = self._sent_at if self._heard_at is None else self._heard_at
        left = since + self._silence_seconds - self._loop.time()
        if left > 0 or self._paused or self._is_excused():
            self._silence = self._loop.call_later(left if left > 0 else self._silence_seconds, self._check_silence)
            return
        self.fail(EngineTimeout(f"the engine did not answer in time: nothing came for {self._silence_seconds:g} s"))

    def _stop_timer(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _headers(url: SplitResult) -> str:
    host = url.netloc.rpartition("@")[2]
    headers = f"host: {host}\r\nuser-agent: base-rl\r\naccept: */*\r\ncontent-type: application/json\r\n"
    if url.username is not None:
        pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
        headers += f"authorization: Basic {base64.b64encode(pair.encode()).decode()}\r\n"
    return headers


def _lost(why: str) -> EngineUnavailable:
    return EngineUnavailable(f"the connection to the engine was lost: {why}")
