"""The outermost ASGI layer: it assigns request ids, measures requests and answers uncaught exceptions."""

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

# Status in the metrics, borrowed from nginx, for a request whose client left before it was answered.
_CLIENT_LEFT = 499


class RequestObserver(Protocol):
    """Receiver of each finished request, for the metrics."""

    def request_finished(self, *, method: str, route: str, status: int, seconds: float) -> None: ...


class RequestBoundary:
    """ASGI layer that gives every answer an `x-request-id` and answers uncaught exceptions with 500.

    The id is the client's own if it sent one of harmless characters. `scope["state"]["request_id"]` contains it.
    Exceptions are logged with their traceback.
    """

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
        except ClientDisconnect:  # while the client was sending its body, so nobody waits for an answer
            status = _CLIENT_LEFT
        except MemoryError:
            _LOG.error("out of memory", method=scope["method"], path=scope["path"])
            if status:
                raise
            refusal = Overloaded("this proxy has no memory left for this request: send less at once or try again")
            await error_response(refusal, scope)(scope, receive, send_with_id)
        except Exception:
            _LOG.exception("request failed", method=scope["method"], path=scope["path"])
            if status:
                raise  # half an answer has been sent: only a closed connection can signal the error
            failure = BaseRlError(f"internal error of base-rl: its log has details under the request id {request_id}")
            await error_response(failure, scope)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "unmatched")
            self._observer.request_finished(method=scope["method"], route=route, status=status, seconds=seconds)
            if _STANDARD_LOG.isEnabledFor(logging.DEBUG):
                _LOG.debug("request", method=scope["method"], path=scope["path"], status=status, seconds=seconds)
            log.request_id.reset(logged)


def _header(scope: Scope, name: bytes) -> str:
    """Return the first header of this name, or an empty string."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return ""
