"""The outermost ASGI layers: a request's id, its measure, its bound, and the last catch of an error."""

from __future__ import annotations

import logging
import re
import time
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy import log
from proxy.contract.identifiers import new_request_id
from proxy.errors import BaseRlError, PayloadTooLarge
from proxy.http.errors import error_response

_LOG = log.logger(__name__)
_STANDARD_LOG = logging.getLogger(__name__)
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


_LEFT = 499
"""What is counted for a request whose client left."""


class RequestObserver(Protocol):
    """Hears of every answered request."""

    def request_finished(self, *, method: str, route: str, status: int, seconds: float) -> None: ...


class RequestBoundary:
    """Gives every answer an `x-request-id` (the client's own where it sent a plain one) and turns what nobody
    caught into an enveloped 500, logged with its traceback. `scope["state"]["request_id"]` holds the id."""

    def __init__(self, app: ASGIApp, observer: RequestObserver) -> None:
        self._app = app
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given if given and _CLIENT_ID.fullmatch(given) else new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        logged = log.request_id.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:  # while it sent its body: nobody waits for an answer
            status = _LEFT
        except Exception:
            _LOG.exception("request failed", method=scope["method"], path=scope["path"])
            if status:
                raise  # half an answer is out: only closing the connection tells the client
            failure = BaseRlError(f"an error in base-rl; its log has more under the request id {request_id}")
            await error_response(failure, scope)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "unmatched")
            self._observer.request_finished(method=scope["method"], route=route, status=status, seconds=seconds)
            if _STANDARD_LOG.isEnabledFor(logging.DEBUG):
                _LOG.debug("request", method=scope["method"], path=scope["path"], status=status, seconds=seconds)
            log.request_id.reset(logged)


class BodyBound:
    """Answers 413 to bodies above `limit` bytes, announced or not, without keeping more than that of them."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = _header(scope, b"content-length")
        if announced.isdecimal():
            if int(announced) > self._limit:
                await error_response(self._error(), scope)(scope, receive, send)
                return
            if not _header(scope, b"transfer-encoding"):  # the server takes no more than was announced
                await self._app(scope, receive, send)
                return
        bound = _Bound(receive, send, self._limit)
        try:
            await self._app(scope, bound.receive, bound.send)
        except PayloadTooLarge:
            if bound.answered:
                raise
        if bound.exceeded and not bound.answered:
            await error_response(self._error(), scope)(scope, receive, send)

    def _error(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._limit} bytes (server.max_body_mib)")


class _Bound:
    """Counts a request's body. Once it is too large, what the application answers to its failed reading is dropped:
    frameworks turn that into an error of their own."""

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive = receive
        self._send = send
        self._left = limit
        self.exceeded = False
        self.answered = False

    async def receive(self) -> Message:
        message: dict[str, Any] = dict(await self._receive())
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                self.exceeded = True
                raise PayloadTooLarge("the body is too large")
        return message

    async def send(self, message: Message) -> None:
        if self.exceeded and not self.answered:
            return
        self.answered = True
        await self._send(message)


def _header(scope: Scope, name: bytes) -> str:
    """The first of this name; empty without one."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return ""
