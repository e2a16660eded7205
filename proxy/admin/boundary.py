"""The route class of every page: security headers, and errors as pages that say what to do."""

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

# Pages show text that agents and models wrote. Even if some of it reached the page unescaped, the browser would run
# only the files that this proxy serves.
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
    403: "Sign out, then sign in with an admin key: it can see and change every run.",
    404: "Check the address, or find the run on the first page, which lists all of them.",
    503: "The proxy keeps retrying. Check its log, the disk and the address of the database; then reload.",
}


class PageRoute(StrictRoute):
    """A route that answers browsers: security headers on every response, errors as HTML pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            response = await _guarded(handler, request)
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
            # A page shows what only this visitor may see, so no cache may store it. Static files set their own
            # header.
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
    """Send the browser to the sign-in form, which leads back to `path`.

    htmx follows a redirect inside the fragment that it replaces; the `hx-redirect` header moves the whole page. An
    event stream cannot show a form and gets a bare 401.
    """
    address = f"/admin/login?next={quote(path, safe='/')}"
    if request.headers.get("hx-request") == "true":
        return Response(status_code=401, headers={"hx-redirect": address})
    if "text/event-stream" in request.headers.get("accept", ""):
        return Response(status_code=401)
    return RedirectResponse(address, status_code=303)


def _refusal(request: Request, error: InvalidRequest) -> Response:
    """Return the error page. For a fragment, return the header with which htmx opens the refused address as a page,
    where the error is readable."""
    if request.method == "GET" and request.headers.get("hx-request") == "true":
        query = f"?{request.url.query}" if request.url.query else ""
        return Response(status_code=error.status, headers={"hx-redirect": f"{quote(request.url.path)}{query}"})
    return error_page(error)


def error_page(error: BaseRlError) -> Response:
    title, remedy = _title(error.status), _remedy(error.status)
    if isinstance(error, StoreDamaged):
        title, remedy = "The store is damaged", "Nothing more is written to it; the proxy's log names the file."
    elif isinstance(error, StoreUnavailable):
        title = "The database is not responding"
    page = render("error.html", status=error.status, title=title, message=error.message, remedy=remedy)
    return HTMLResponse(page, status_code=error.status)


def _title(status: int) -> str:
    return {400: "Invalid request", 403: "This key is not allowed to do that", 404: "Not found"}.get(
        status, "Something went wrong"
    )


def _remedy(status: int) -> str:
    return _REMEDIES.get(status, "Go back and try again. If it keeps happening, the proxy's log has the details.")
