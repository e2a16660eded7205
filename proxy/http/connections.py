"""Bound the connections of a server.

There are bounds on their number, the size of a request's line and headers, the time in which a request must arrive,
and the time in which a client must read its answer. uvicorn has none of these with its fast parser (`httptools`),
which keeps a header of any length in memory.
"""

from __future__ import annotations

import asyncio
import json
import time
from enum import Enum, auto
from typing import Any, Protocol

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from proxy.contract.identifiers import new_request_id
from proxy.errors import BaseRlError, HeadersTooLarge, InvalidRequest, Overloaded, RequestTimedOut
from proxy.log import logger

_LOG = logger(__name__)

# Bytes of a header line beyond its name and value: the colon, the space, and the end of the line.
_LINE_BYTES = 4

# Requests that a client may send on one connection before their answers. No known client sends any.
_MOST_PIPELINED = 16

# Bytes of body that may arrive for a pipelined request whose predecessors are not answered yet.
_MOST_PIPELINED_BYTES = 1 << 20

# Minimum time between two warnings of one kind, so that a flood of connections does not flood the log.
_WARNING_SECONDS = 10.0


class ConnectionBounds(Protocol):
    """The server settings that bound connections."""

    @property
    def max_connections(self) -> int: ...
    @property
    def max_header_kib(self) -> int: ...
    @property
    def max_headers(self) -> int: ...
    @property
    def header_timeout_seconds(self) -> float: ...
    @property
    def body_timeout_seconds(self) -> float: ...
    @property
    def answer_timeout_seconds(self) -> float: ...


class ConnectionObserver(Protocol):
    """Receiver of each refusal and its reason, for the metrics."""

    def connection_refused(self, *, reason: str) -> None: ...


class Connections:
    """The open connections of one server, at most `most`.

    When all are open, a new connection replaces the one that has been idle for longest, so that idle connections
    cannot shut out others. It is refused if none is idle.
    """

    def __init__(self, bounds: ConnectionBounds, observer: ConnectionObserver, *, most: int) -> None:
        """`most` may be less than `bounds.max_connections` (see `connections_within`)."""
        self.bounds = bounds
        self._observer = observer
        self._most = most
        self._open: set[BoundedConnection] = set()
        self._idle: dict[BoundedConnection, None] = {}  # a set that keeps the order in which they became idle
        self._warned_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: BoundedConnection) -> bool:
        """Add a new connection, closing an idle one if necessary. Return False if there is no room for it."""
        if len(self._open) >= self._most:
            victim = next(iter(self._idle), None)
            if victim is None:
                self.refused("connections", f"{self._most} connections are open and all are in use")
                return False
            self.refused("idle", f"{self._most} connections are open; idle ones are closed for new ones")
            self.leave(victim)
            victim.end()
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def leave(self, connection: BoundedConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def is_idle(self, connection: BoundedConnection) -> None:
        """Record that a connection waits for its next request."""
        if connection in self._open:
            self._idle[connection] = None

    def is_busy(self, connection: BoundedConnection) -> None:
        """Record that a connection has a request to answer."""
        self._idle.pop(connection, None)

    def refused(self, reason: str, message: str) -> None:
        """Count a refusal, and log it unless one of its kind was logged in the last ten seconds."""
        self._observer.connection_refused(reason=reason)
        now = time.monotonic()
        if now - self._warned_at.get(reason, -_WARNING_SECONDS) >= _WARNING_SECONDS:
            self._warned_at[reason] = now
            _LOG.warning("connection refused", reason=message, open=len(self._open))


class _Phase(Enum):
    BETWEEN = auto()
    """The last request was received whole, and the next has not begun."""
    HEAD = auto()
    BODY = auto()


class _Refused(Exception):
    """Exception that stops the parser, which turns it into an error of its own and calls `send_400_response`."""


class BoundedConnection(HttpToolsProtocol):
    """One HTTP connection within the bounds of `Connections`.

    Timers only run while a request has arrived in part or an answer is buffered. A request that arrives in one piece,
    and an answer that fits the socket's buffers, cost no timer.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections = connections
        self._bounds = connections.bounds
        self._most_head_bytes = connections.bounds.max_header_kib << 10
        self._phase = _Phase.BETWEEN
        self._refusal: BaseRlError | None = None
        self._head_bytes = 0
        """Parsed bytes of the current request's line and headers."""
        self._pending_bytes = 0
        """Bytes received since the parser last completed a head or a part of a body. It may hold all of them."""
        self._timer: asyncio.TimerHandle | None = None
        self._timed_phase: _Phase | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._connections.enter(self):
            self._refuse(
                Overloaded("all connections of this proxy are in use: try again in a second", retry_after=1.0)
            )
            return
        self._arm(_Phase.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._disarm()
        self._disarm_unread()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection without an answer."""
        self._disarm()
        self._close()

    def pause_writing(self) -> None:
        """Start the timer within which the client must read some of the buffered answer."""
        super().pause_writing()
        self._arm_unread()

    def resume_writing(self) -> None:
        """Stop that timer: the client has read most of the buffered answer."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._disarm_unread()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # refused: uvloop may still deliver data that it had read before
            return
        self._pending_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._phase is not _Phase.BETWEEN and self._pending_bytes > self._most_head_bytes:
            # An unfinished header, or a trailer after a body: the parser keeps it in memory until it ends.
            self._refuse(self._headers_too_large())
        elif self._phase is not _Phase.BETWEEN:
            self._arm(self._phase)
        elif self.cycle is None or self.cycle.response_complete:
            # Empty lines between requests begin no request, but they stop uvicorn's keep-alive timer.
            self._arm(_Phase.HEAD)
        else:
            self._disarm()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _Phase.HEAD
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + _LINE_BYTES)
        super().on_header(name, value)
        if len(self.headers) > self._bounds.max_headers:
            self._refusal = self._headers_too_large()
            raise _Refused

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise _Refused
        self._phase = _Phase.BODY
        self._pending_bytes = 0
        self._connections.is_busy(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > _MOST_PIPELINED_BYTES:
            raise _Refused

    def on_message_complete(self) -> None:
        self._phase = _Phase.BETWEEN
        self._pending_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and (self.cycle is None or self.cycle.response_complete):
            self._connections.is_idle(self)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser refused: invalid HTTP, or a head that exceeds the bounds."""
        if self._refusal is None:
            self._connections.refused("malformed", "bytes that are not a valid HTTP request")
        self._refuse(self._refusal or InvalidRequest("this is not a valid HTTP request"))

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._most_head_bytes:
            self._refusal = self._headers_too_large()
            raise _Refused

    def _headers_too_large(self) -> HeadersTooLarge:
        self._connections.refused("headers", "headers beyond server.max_header_kib or server.max_headers")
        return HeadersTooLarge(
            f"the request line and headers exceed {self._bounds.max_header_kib} KiB or "
            f"{self._bounds.max_headers} headers (server.max_header_kib, server.max_headers)"
        )

    def _refuse(self, error: BaseRlError) -> None:
        """Answer with `error` if no other answer has begun or is due before, and close the connection."""
        self._disarm()
        cycle = self.cycle
        all_answered = cycle is None or cycle.response_complete
        is_current = cycle is not None and not cycle.response_started and not self.pipeline
        if all_answered or is_current:
            self.transport.write(_answer(error))
        if cycle is not None:
            cycle.disconnected = True  # the application is notified that its client left, and sends nothing
            cycle.message_event.set()
        self._close()

    def _arm(self, phase: _Phase) -> None:
        """Start the timer within which the rest of a head or a body must arrive, unless it is running."""
        if self._timed_phase is phase:
            return
        self._disarm()
        seconds = self._bounds.body_timeout_seconds if phase is _Phase.BODY else self._bounds.header_timeout_seconds
        self._timed_phase = phase
        self._timer = self.loop.call_later(seconds, self._timed_out, phase)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timed_phase = None

    def _close(self) -> None:
        """Close the connection when the client has read the buffered answer, or has read none of it for too long."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._arm_unread()

    def _arm_unread(self) -> None:
        if self._unread_timer is None:
            unread = self.transport.get_write_buffer_size()
            self._unread_timer = self.loop.call_later(self._bounds.answer_timeout_seconds, self._unread, unread)

    def _disarm_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self._unread_timer = None

    def _unread(self, before: int) -> None:
        """Abort the connection if its client has read nothing since `before` bytes were buffered for it."""
        self._unread_timer = None
        unread = self.transport.get_write_buffer_size()
        if not unread:
            return
        if unread < before:  # a slow client, but one that reads
            self._arm_unread()
            return
        self._connections.refused("answer_time", "an answer that was not read within server.answer_timeout_seconds")
        self.transport.abort()

    def _timed_out(self, phase: _Phase) -> None:
        self._timer = self._timed_phase = None
        if self.transport.is_closing():
            return
        if phase is _Phase.BODY:
            self._connections.refused("body_time", "a body that did not end within server.body_timeout_seconds")
            message = f"the body did not end within {self._bounds.body_timeout_seconds:g} seconds"
            self._refuse(RequestTimedOut(f"{message} (server.body_timeout_seconds)"))
        elif self._phase is _Phase.HEAD:
            self._connections.refused("header_time", "headers that did not end within server.header_timeout_seconds")
            message = f"the headers did not end within {self._bounds.header_timeout_seconds:g} seconds"
            self._refuse(RequestTimedOut(f"{message} (server.header_timeout_seconds)"))
        else:  # no request has begun, so there is nothing to answer
            self.end()


def _answer(error: BaseRlError) -> bytes:
    """Return a whole HTTP response with the error's envelope, after which the connection closes."""
    body = json.dumps(error.envelope()).encode()
    lines = [
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"x-request-id: " + new_request_id().encode(),
        b"connection: close",
    ]
    if error.retry_after is not None:
        lines.append(b"retry-after: %d" % max(1, round(error.retry_after)))
    return STATUS_LINE[error.status] + b"\r\n".join(lines) + b"\r\n\r\n" + body


def connections_within(setting: int, descriptors: int) -> int:
    """Return how many connections fit into `descriptors` file descriptors, at most `setting`.

    A quarter of the descriptors, at most 512, is reserved for the engine, the database and files, which must continue
    to work when clients have opened all their connections.
    """
    return max(1, min(setting, descriptors - min(512, descriptors // 4)))
