"""What every page has: headers that let only our own files run, and errors as pages that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import quote

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from proxy.admin.sign_in import SignInNeeded
from proxy.admin.templating import render
from proxy.errors import BaseRlError, InvalidRequest, NotFound, StoreDamaged, StoreUnavailable
from proxy.http.errors import named
from proxy.http.strict_route import StrictRoute

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_REMEDIES = {
    403: "Sign out, and sign in with an admin key: it sees every run and may change them.",
    404: "It may have another name, or belong to another installation. All runs are on the first page.",
    503: "The proxy goes on trying. Look at its log, and at the disk and the address of the database; then reload.",
}


class PageRoute(StrictRoute):
    """A route that answers browsers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            response = await _guarded(handler, request)
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
            response.headers.setdefault("cache-control", "no-store")
            return response

        return answer


async def _guarded(handler: Callable[[Request], Coroutine[Any, Any, Response]], request: Request) -> Response:
    try:
        return await handler(request)
    except SignInNeeded as needed:
        return to_sign_in(request, needed.path)
    except InvalidRequest as error:
        return _refusal(request, error)
    except BaseRlError as error:
        return error_page(error)
    except RequestValidationError as error:
        return _refusal(request, named(error))
    except HTTPException as error:
        failure = NotFound("there is no such page") if error.status_code == 404 else BaseRlError(str(error.detail))
        return error_page(failure)


def to_sign_in(request: Request, path: str) -> Response:
    """The form; for a fragment, the header by which htmx moves the whole page there."""
    address = f"/admin/login?next={quote(path, safe='/')}"
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"hx-redirect": address})
    if "text/event-stream" in request.headers.get("accept", ""):
        return Response(status_code=401)
    return RedirectResponse(address, status_code=303)


def _refusal(request: Request, error: InvalidRequest) -> Response:
    """The error page; for a fragment, the header by which htmx opens that page at the address that was refused."""
    if request.method == "GET" and request.headers.get("hx-request") == "true":
        query = f"?{request.url.query}" if request.url.query else ""
        return Response(status_code=error.status, headers={"hx-redirect": f"{quote(request.url.path)}{query}"})
    return error_page(error)


def error_page(error: BaseRlError) -> Response:
    title, remedy = _title(error.status), _remedy(error.status)
    if isinstance(error, StoreDamaged):
        title, remedy = "The store is damaged", "Nothing is written to it any more; the proxy's log has its place."
    elif isinstance(error, StoreUnavailable):
        title = "The database does not answer"
    page = render("error.html", status=error.status, title=title, message=error.message, remedy=remedy)
    return HTMLResponse(page, status_code=error.status)


def _title(status: int) -> str:
    return {400: "That did not make sense", 403: "This key may not do that", 404: "Nothing is here"}.get(
        status, "That did not work"
    )


def _remedy(status: int) -> str:
    return _REMEDIES.get(status, "Go back and try again; if it stays so, the proxy's log says more.")
