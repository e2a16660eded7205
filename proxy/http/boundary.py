"""The outermost ASGI layer: a request's id, its measure, and the last catch of an error."""

from __future__ import annotations

import logging
import re
import time
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy import log
from proxy.contract.identifiers import new_request_id
from proxy.errors import BaseRlError, Overloaded
from proxy.http.errors import error_response

_LOG = log.logger(__name__)
_STANDARD_LOG = logging.getLogger(__name__)
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


_LEFT = 499
"""The status counted in metrics for a request whose client left before it was answered; nginx's number for it."""


class RequestObserver(Protocol):
    """Receives each answered request, for the metrics."""

    def request_finished(self, *, method: str, route: str, status: int, seconds: float) -> None: ...


class RequestBoundary:
    """Give every answer an `x-request-id` (the client's own where it sent a plain one) and turn an exception that
    nobody caught into an enveloped 500, logged with its traceback. `scope["state"]["request_id"]` holds the id."""

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
        except MemoryError:
            _LOG.error("out of memory", method=scope["method"], path=scope["path"])
            if status:
                raise
            refusal = Overloaded("this proxy has no memory left for this request: send less at once, or try again")
            await error_response(refusal, scope)(scope, receive, send_with_id)
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


def _header(scope: Scope, name: bytes) -> str:
    """Return the first header of this name; empty without one."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return ""
