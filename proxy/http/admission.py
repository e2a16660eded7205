"""Admit request bodies: check the key, reserve room for the bytes, and only then let the body be read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.errors import AuthenticationFailed, BaseRlError, Overloaded, PayloadTooLarge, TooManyBytes
from proxy.http.errors import error_response
from proxy.log import logger

_LOG = logger(__name__)

FREE_BYTES = 1 << 16
"""Bodies up to this size are not counted, and are read without a key. uvicorn reads this much from each connection in
any case, and `server.max_connections` bounds the number of connections."""

# Retry-After of a refusal. It is short because most calls end within seconds.
_RETRY_SECONDS = 1.0

Authenticate = Callable[[Scope], Awaitable[str | None]]
"""Function that returns the id of the request's key, None without one. It raises a BaseRlError for an invalid key."""


class BodyBytes:
    """Counter of the bytes of all bodies whose requests are being answered, in total and for each key."""

    def __init__(self, *, most: int, most_per_key: int) -> None:
        self._most = most
        self._most_per_key = most_per_key
        self._total = 0
        self._by_key: dict[str, int] = {}

    @property
    def total(self) -> int:
        return self._total

    def add(self, key: str, size: int) -> None:
        """Count `size` bytes. If they are too many, count none and raise TooManyBytes or Overloaded."""
        key_bytes = self._by_key.get(key, 0)
        if key_bytes + size > self._most_per_key:
            raise TooManyBytes(
                f"open requests of this key have {key_bytes} bytes of bodies, and {size} more would exceed "
                f"{self._most_per_key} (server.max_bodies_mib_per_key): try again when some of them have ended",
                retry_after=_RETRY_SECONDS,
            )
        if self._total + size > self._most:
            _LOG.warning("body refused", reason="server.max_bodies_mib", bytes=size, in_work=self._total)
            raise Overloaded(
                f"open requests of this proxy have {self._total} bytes of bodies, and {size} more would exceed "
                f"{self._most} (server.max_bodies_mib): try again when some of them have ended",
                retry_after=_RETRY_SECONDS,
            )
        self._by_key[key] = key_bytes + size
        self._total += size

    def remove(self, key: str, size: int) -> None:
        left = self._by_key[key] - size
        if left:
            self._by_key[key] = left
        else:
            del self._by_key[key]
        self._total -= size


class BodyAdmission:
    """ASGI layer that refuses bodies before they are read.

    It refuses a body without a valid key (401), one that is too large (413), and one for which there is no room (429
    for the key, 503 for the proxy). A key is checked before all else, so that a wrong key is reported as such and not
    as a missing field. Bytes are counted until the request is answered. A body without an announced length is counted
    as it arrives.
    """

    def __init__(self, app: ASGIApp, *, limit: int, in_work: BodyBytes, authenticate: Authenticate) -> None:
        self._app = app
        self._limit = limit
        self._in_work = in_work
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced, is_chunked = _framing(scope)
        if not announced and not is_chunked:  # no body, as most GETs
            await self._app(scope, receive, send)
            return
        try:
            key = await self._authenticate(scope)
            if announced > self._limit:
                raise self._too_large()
            if key is None and (is_chunked or announced > FREE_BYTES):
                raise AuthenticationFailed(
                    "no API key: send it as 'Authorization: Bearer …' or 'x-api-key: …'. Without one, only bodies "
                    f"with a content-length of up to {FREE_BYTES} bytes are read"
                )
            lease = _Lease(self._in_work, key or "")
            if not is_chunked:  # uvicorn reads no more than the announced length
                lease.grow(announced)
        except BaseRlError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        try:
            if is_chunked:
                await self._counted(lease, scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            lease.end()

    async def _counted(self, lease: _Lease, scope: Scope, receive: Receive, send: Send) -> None:
        counting = _Counting(receive, send, lease, self._limit, self._too_large())
        try:
            await self._app(scope, counting.receive, counting.send)
        except BaseRlError as error:
            if counting.answered or error is not counting.refusal:
                raise
        if counting.refusal is not None and not counting.answered:
            await error_response(counting.refusal, scope)(scope, receive, send)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._limit} bytes (server.max_body_mib)")


class _Lease:
    """The counted bytes of one request."""

    def __init__(self, in_work: BodyBytes, key: str) -> None:
        self._in_work = in_work
        self._key = key
        self._size = 0
        self._counted = 0

    def grow(self, size: int) -> None:
        """Add `size` bytes, counted once the body exceeds `FREE_BYTES`. Raise TooManyBytes or Overloaded."""
        self._size += size
        if self._size > FREE_BYTES:
            self._in_work.add(self._key, self._size - self._counted)
            self._counted = self._size

    def end(self) -> None:
        if self._counted:
            self._in_work.remove(self._key, self._counted)
            self._counted = 0


class _Counting:
    """Counter of a body as it arrives.

    `receive` raises the refusal. After that, `send` drops the application's answer: frameworks turn the exception
    into an answer of their own.
    """

    def __init__(self, receive: Receive, send: Send, lease: _Lease, limit: int, too_large: PayloadTooLarge) -> None:
        self._receive = receive
        self._send = send
        self._lease = lease
        self._left = limit
        self._too_large = too_large
        self.refusal: BaseRlError | None = None
        self.answered = False

    async def receive(self) -> Message:
        message: dict[str, Any] = dict(await self._receive())
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._left -= size
            try:
                if self._left < 0:
                    raise self._too_large
                self._lease.grow(size)
            except BaseRlError as error:
                self.refusal = error
                raise
        return message

    async def send(self, message: Message) -> None:
        if self.refusal is not None and not self.answered:
            return
        self.answered = True
        await self._send(message)


def _framing(scope: Scope) -> tuple[int, bool]:
    """Return the announced length (0 without one), and whether the body comes in chunks of unknown length."""
    length, is_chunked = 0, False
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = int(value) if value.isdigit() else 0
        elif name == b"transfer-encoding":
            is_chunked = True
    return length, is_chunked
