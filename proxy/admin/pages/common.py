"""What the modules of pages share: their routers, the signed-in visitor, and the run that a path names."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException

from proxy.admin.boundary import PageRoute
from proxy.admin.sign_in import SignIn, Visitor, check_origin
from proxy.auth.access import Right, require_right, unknown_run
from proxy.errors import BaseRlError, InvalidRequest, PermissionDenied
from proxy.http.services import service
from proxy.overview.service import OverviewService
from proxy.overview.views import RunSummary
from proxy.projects.service import ProjectDirectory
from proxy.settings import Settings

PAGE_SIZE = 20
"""Rows per page of a table."""

NO_STORE = {"cache-control": "no-store"}
"""The header of an answer with a secret, which must not stay in the browser's cache."""


def page_router() -> APIRouter:
    """Return a router whose routes are pages below /admin."""
    return APIRouter(prefix="/admin", route_class=PageRoute, include_in_schema=False)


def _sign_in(request: Request) -> SignIn:
    return service(request, SignIn)


Entrance = Annotated[SignIn, Depends(_sign_in)]


async def _visitor(request: Request, entrance: Entrance) -> Visitor:
    visitor = await entrance.visitor(request)
    if visitor.rates_only:
        raise PermissionDenied("a reviewer key opens the pages below /admin/review alone: sign in with another key")
    return visitor


Guest = Annotated[Visitor, Depends(_visitor)]


async def _administrator(visitor: Guest) -> Visitor:
    if not visitor.is_admin:
        raise PermissionDenied("this needs an admin key")
    return visitor


Administrator = Annotated[Visitor, Depends(_administrator)]


async def _manager(visitor: Guest) -> Visitor:
    require_right(visitor.principal, Right.CHANGE)
    return visitor


Manager = Annotated[Visitor, Depends(_manager)]


def _own_origin(request: Request) -> None:
    check_origin(request, service(request, Settings).server.public_url)


OWN_ORIGIN = Depends(_own_origin)
"""Refuses a changing request that another site's page sent."""


async def visible_run(run: str, overview: OverviewService, visitor: Visitor) -> RunSummary:
    """Return the run's summary. Raise NotFound if there is no such run or the visitor may not see it."""
    # NotFound rather than PermissionDenied: a key must not learn which runs exist outside of its scope.
    if not visitor.may_see(await overview.owned_run(run)):
        raise unknown_run(run)
    return await overview.run(run)


def is_fragment(request: Request) -> bool:
    """Return whether htmx asks for a part of a page."""
    return request.headers.get("hx-request") == "true"


def query_of(values: Mapping[str, Any]) -> str:
    """Return the values as a query with its question mark; an empty text without values."""
    return f"?{urlencode(values)}" if values else ""


def digest(*shown: Sequence[Any]) -> str:
    """Return a text that changes with what a part of a page shows; times are left to the browser, which counts on."""
    return hashlib.sha256(msgspec.json.encode(shown)).hexdigest()[:16]


async def form_of(request: Request) -> dict[str, str]:
    """Return the texts of a submitted form by field. Raise InvalidRequest for a body that is no form."""
    try:
        form = await request.form(max_files=0)
    except HTTPException as error:
        raise InvalidRequest(f"this is not a form: {error.detail}") from error
    return {name: value for name, value in form.items() if isinstance(value, str)}


def field_errors(error: BaseRlError, fields: Collection[str]) -> dict[str, str]:
    """Return the error's message by the form field that it is about; by an empty text if it is about none of
    `fields`."""
    return {error.param if error.param is not None and error.param in fields else "": error.message}


def chosen_seconds(text: str, choices: Mapping[str, str]) -> float:
    """Return the seconds of a choice of a form. Raise InvalidRequest for a text that is none."""
    if text not in choices or not text:
        raise InvalidRequest("choose one of the times")
    return float(text)


async def scope_names(request: Request, overview: OverviewService) -> dict[str, str]:
    """Return the names of runs and projects by their ids."""
    names = {run.id: run.name for run in await overview.board.glances(with_archived=True)}
    projects = await service(request, ProjectDirectory).list_()
    return names | {project.id: project.name for project in projects}
