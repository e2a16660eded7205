"""The pages that sign a visitor in and out."""

from __future__ import annotations

from typing import Annotated

from fastapi import Form, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.pages.common import OWN_ORIGIN, Entrance, page_router
from proxy.admin.sign_in import local_path
from proxy.admin.templating import render
from proxy.errors import AuthenticationFailed, PermissionDenied
from proxy.http.address import is_https

router = page_router()


@router.get("/login")
async def login_form(next_: Annotated[str, Query(alias="next")] = "/admin") -> Response:
    return HTMLResponse(render("login.html", next=local_path(next_), problem=None))


@router.post("/login", dependencies=[OWN_ORIGIN])
async def login(
    request: Request,
    entrance: Entrance,
    key: Annotated[str, Form(max_length=512)] = "",
    next_: Annotated[str, Form(alias="next", max_length=2048)] = "/admin",
) -> Response:
    try:
        visitor = await entrance.enter(key.strip())
    except (AuthenticationFailed, PermissionDenied) as error:
        problem = "This key is unknown here or was revoked." if error.status == 401 else error.message
        return HTMLResponse(render("login.html", next=local_path(next_), problem=problem), status_code=error.status)
    # A reviewer has no other pages, whatever address the form came from.
    wanted = local_path(next_)
    if visitor.rates_only and not wanted.startswith(visitor.home):
        wanted = visitor.home
    response = RedirectResponse(wanted, status_code=303)
    entrance.remember(visitor, response, secure=is_https(request))
    return response


@router.post("/logout", dependencies=[OWN_ORIGIN])
async def logout(request: Request, entrance: Entrance) -> Response:
    response = RedirectResponse("/admin/login", status_code=303)
    await entrance.leave(request, response)
    return response
