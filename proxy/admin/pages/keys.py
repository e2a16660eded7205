"""The pages of keys: which there are, and forms that create, change, rotate and revoke them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.limits_form import LABELS, limit_texts, limits_in
from proxy.admin.pages.common import (
    NO_STORE,
    OWN_ORIGIN,
    PAGE_SIZE,
    Manager,
    chosen_seconds,
    field_errors,
    form_of,
    page_router,
    query_of,
    scope_names,
)
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.auth.access import PrincipalKind
from proxy.auth.service import BOOTSTRAP, Credentials, KeyView
from proxy.errors import BaseRlError, Conflict, InvalidRequest, NotFound, PermissionDenied
from proxy.http.body import validated
from proxy.http.services import service
from proxy.keys.requests import ChangedKeyBody, NewKeyBody, RotateBody, create_checked, managed_key
from proxy.limits.subjects import Scope
from proxy.overview.endpoints import Overview
from proxy.overview.filters import Cursor
from proxy.overview.service import OverviewService
from proxy.projects.service import ProjectDirectory
from proxy.usage.service import LimitsView, UsageService

router = page_router()

_KINDS = tuple(kind for kind in PrincipalKind if kind is not PrincipalKind.SESSION)
_LIMITED = ("run", "project")
LIVES = {"": "never", "86400": "in a day", "604800": "in a week", "2592000": "in 30 days", "31536000": "in a year"}
"""The choices of a key's life: seconds, and the words for them."""
GRACES = {"0": "stops at once", "3600": "works for an hour", "86400": "works for a day", "604800": "works for a week"}
"""The choices for the replaced key of a rotation."""


def _credentials(request: Request) -> Credentials:
    return service(request, Credentials)


Keys = Annotated[Credentials, Depends(_credentials)]


@router.get("/keys")
async def keys(
    request: Request,
    overview: Overview,
    credentials: Keys,
    visitor: Manager,
    kind: Literal["", "admin", "project", "run", "trainer", "viewer", "reviewer", "session"] = "",
    revoked: bool = False,
    cursor: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Show the keys that the visitor may manage, newest first."""
    after = Cursor.decode(cursor) if cursor else None
    found = await credentials.page(
        kinds=(PrincipalKind(kind),) if kind else _KINDS,
        project_id=visitor.principal.project_id,
        with_revoked=revoked,
        below=None if after is None else (after.at, after.key),
        limit=PAGE_SIZE + 1,
    )
    last = found[PAGE_SIZE - 1] if len(found) > PAGE_SIZE else None
    asked = {"kind": kind, "revoked": "true" if revoked else ""}
    only = {name: value for name, value in asked.items() if value}
    following = None if last is None else {"cursor": Cursor(at=last.created_at, key=last.id).encode()}
    values: dict[str, Any] = {
        "keys": found[:PAGE_SIZE],
        "names": await scope_names(request, overview),
        "limits": await _limits_by_key(request, visitor),
        "kinds": _KINDS,
        "wanted": asked,
        "newest": query_of(only) if cursor else None,
        "older": None if following is None else query_of(only | following),
        "own": visitor.principal.key_id,
    }
    return HTMLResponse(render("keys.html", visitor=visitor, now=overview.now(), **values))


@router.get("/new-key")
async def new_key_form(
    request: Request,
    overview: Overview,
    visitor: Manager,
    run: Annotated[str, Query(max_length=200)] = "",
    project: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    form = {"kind": "project" if project else "run", "run": run, "project": project}
    return HTMLResponse(await _form_page(request, overview, visitor, form, {}))


@router.post("/new-key", dependencies=[OWN_ORIGIN])
async def create_key(request: Request, overview: Overview, credentials: Keys, visitor: Manager) -> Response:
    """Create a key and show its text once, or show the form again with the error beside its field."""
    form = {name: text.strip() for name, text in (await form_of(request)).items()}
    directory = service(request, ProjectDirectory)
    try:
        given: dict[str, Any] = {name: form[name] for name in ("kind", "run", "project", "name") if form.get(name)}
        if form.get("all_runs"):
            given["all_runs"] = True
        if form.get("expires_in"):
            given["expires_in"] = chosen_seconds(form["expires_in"], LIVES)
        if (limits := limits_in(form)) is not None:
            given["limits"] = limits
        made = await create_checked(validated(NewKeyBody, given), visitor.principal, overview, credentials, directory)
    except (InvalidRequest, NotFound, PermissionDenied) as error:
        errors = _errors(error)
        page = await _form_page(request, overview, visitor, form, errors)
        return HTMLResponse(page, status_code=400 if isinstance(error, NotFound) else error.status)
    return await _made(credentials, visitor, made.id, made.text)


@router.get("/keys/{key_id}")
async def key(key_id: str, request: Request, overview: Overview, credentials: Keys, visitor: Manager) -> Response:
    view = await managed_key(key_id, visitor.principal, overview, credentials)
    return HTMLResponse(await _key_page(request, overview, visitor, view, {}))


@router.post("/keys/{key_id}", dependencies=[OWN_ORIGIN])
async def change_key(
    key_id: str, request: Request, overview: Overview, credentials: Keys, visitor: Manager
) -> Response:
    """Change the name, the expiry or the limits of a key, or show its page again with the error."""
    view = await managed_key(key_id, visitor.principal, overview, credentials)
    form = await form_of(request)
    try:
        given: dict[str, Any] = {}
        if "name" in form and (form["name"].strip() or None) != view.name:
            given["name"] = form["name"].strip() or None
        if form.get("expires_in", "keep") != "keep":
            given["expires_in"] = chosen_seconds(form["expires_in"], LIVES) if form["expires_in"] else None
        if view.kind.value in _LIMITED:
            given["limits"] = limits_in(form, view.limits)
        if given:
            await credentials.change(key_id, validated(ChangedKeyBody, given).change)
    except (InvalidRequest, Conflict) as error:
        page = await _key_page(request, overview, visitor, view, _errors(error), form)
        return HTMLResponse(page, status_code=error.status)
    return RedirectResponse(f"/admin/keys/{key_id}", status_code=303)


@router.post("/keys/{key_id}/rotate", dependencies=[OWN_ORIGIN])
async def rotate_key(
    key_id: str, request: Request, overview: Overview, credentials: Keys, visitor: Manager
) -> Response:
    """Replace a key, and show the text of its successor once."""
    view = await managed_key(key_id, visitor.principal, overview, credentials)
    form = await form_of(request)
    try:
        grace = validated(RotateBody, {"grace_seconds": chosen_seconds(form.get("grace", "0"), GRACES)})
        rotated = await credentials.rotate(key_id, grace_seconds=grace.grace_seconds)
    except (InvalidRequest, Conflict) as error:
        page = await _key_page(request, overview, visitor, view, _errors(error))
        return HTMLResponse(page, status_code=error.status)
    return await _made(credentials, visitor, rotated.key.id, rotated.key.text)


@router.get("/keys/{key_id}/revoke")
async def revoke_form(key_id: str, overview: Overview, credentials: Keys, visitor: Manager) -> Response:
    """Ask whether a key is to be revoked."""
    view = await managed_key(key_id, visitor.principal, overview, credentials)
    return HTMLResponse(_revoke_page(view, visitor, overview, None))


@router.post("/keys/{key_id}/revoke", dependencies=[OWN_ORIGIN])
async def revoke_key(key_id: str, overview: Overview, credentials: Keys, visitor: Manager) -> Response:
    view = await managed_key(key_id, visitor.principal, overview, credentials)
    try:
        await credentials.revoke(key_id)
    except Conflict as error:
        return HTMLResponse(_revoke_page(view, visitor, overview, error), status_code=error.status)
    return RedirectResponse("/admin/keys", status_code=303)


async def _made(credentials: Credentials, visitor: Visitor, key_id: str, text: str) -> Response:
    view = await credentials.find(key_id)
    return HTMLResponse(render("key_made.html", visitor=visitor, key=view, text=text), headers=NO_STORE)


async def _limits_by_key(request: Request, visitor: Visitor) -> dict[str, LimitsView]:
    found = await service(request, UsageService).visible(visitor.principal)
    return {one.id: one for one in found if one.scope is Scope.KEY}


async def _form_page(
    request: Request, overview: OverviewService, visitor: Visitor, form: dict[str, str], errors: dict[str, str]
) -> str:
    # A request that no form of ours sent may lack fields.
    form = dict.fromkeys(("kind", "run", "project", "name", "all_runs", "expires_in", *LABELS), "") | form
    runs = [run.name for run in await overview.board.glances() if visitor.may_see(run)]
    projects = [
        project.name
        for project in await service(request, ProjectDirectory).list_()
        if visitor.principal.project_id in (None, project.id)
    ]
    kinds = (
        _KINDS
        if visitor.is_admin
        else (PrincipalKind.RUN, PrincipalKind.TRAINER, PrincipalKind.VIEWER, PrincipalKind.REVIEWER)
    )
    values = {"runs": runs, "projects": projects, "kinds": kinds, "lives": LIVES, "limit_fields": LABELS}
    return render("key_form.html", visitor=visitor, form=form, errors=errors, **values)


async def _key_page(
    request: Request,
    overview: OverviewService,
    visitor: Visitor,
    view: KeyView,
    errors: dict[str, str],
    form: dict[str, str] | None = None,
) -> str:
    shown = {"name": view.name or ""} | limit_texts(view.limits) | (form or {})
    values: dict[str, Any] = {
        "key": view,
        "names": await scope_names(request, overview),
        "used": (await _limits_by_key(request, visitor)).get(view.limited_as),
        "form": shown,
        "errors": errors,
        "lives": LIVES,
        "graces": GRACES,
        "limit_fields": LABELS if view.kind.value in _LIMITED else {},
        "is_configured": view.name == BOOTSTRAP,
        "now": overview.now(),
    }
    return render("key.html", visitor=visitor, **values)


def _revoke_page(view: KeyView, visitor: Visitor, overview: OverviewService, error: BaseRlError | None) -> str:
    values = {"key": view, "problem": None if error is None else error.message, "now": overview.now()}
    return render("revoke_key.html", visitor=visitor, own=visitor.principal.key_id, **values)


def _errors(error: BaseRlError) -> dict[str, str]:
    return field_errors(error, ("kind", "run", "project", "name", "expires_in", *LABELS))
