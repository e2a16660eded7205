"""The pages of projects: their runs, keys and limits; forms that create, change, archive and delete them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.limits_form import LABELS, limit_texts, limits_in
from proxy.admin.pages.common import OWN_ORIGIN, Administrator, Guest, field_errors, form_of, page_router
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.auth.access import PrincipalKind, Right, require_right
from proxy.auth.service import Credentials
from proxy.errors import BaseRlError, Conflict, InvalidRequest, NotFound
from proxy.http.body import validated
from proxy.http.services import service
from proxy.limits.subjects import Scope
from proxy.overview.endpoints import Overview
from proxy.overview.service import OverviewService
from proxy.projects.endpoints import NewProjectBody, visible_project
from proxy.projects.service import ProjectDirectory, ProjectView
from proxy.runs.management import RunManagement
from proxy.settings import GivenLimits
from proxy.usage.service import LimitsView, UsageService

router = page_router()

_MOST_KEYS = 100


async def _reader(visitor: Guest) -> Visitor:
    require_right(visitor.principal, Right.SEE_PROJECT)
    return visitor


Reader = Annotated[Visitor, Depends(_reader)]


def _directory(request: Request) -> ProjectDirectory:
    return service(request, ProjectDirectory)


Projects = Annotated[ProjectDirectory, Depends(_directory)]


@router.get("/projects")
async def projects(request: Request, visitor: Reader, directory: Projects) -> Response:
    return HTMLResponse(await _list_page(request, visitor, directory))


@router.post("/projects", dependencies=[OWN_ORIGIN])
async def create_project(request: Request, visitor: Administrator, directory: Projects) -> Response:
    """Create a project, or show the list again with the error beside the form."""
    form = await form_of(request)
    try:
        body = validated(NewProjectBody, {"name": form.get("name", "").strip()})
        made = await directory.create(body.name)
    except (InvalidRequest, Conflict) as error:
        page = await _list_page(request, visitor, directory, form=form, error=error)
        return HTMLResponse(page, status_code=error.status)
    return RedirectResponse(f"/admin/projects/{made.name}", status_code=303)


@router.get("/projects/{project}")
async def project(
    project: str, request: Request, visitor: Reader, overview: Overview, directory: Projects
) -> Response:
    view = await visible_project(project, visitor.principal, directory)
    return HTMLResponse(await _page(request, view, visitor, overview))


@router.post("/projects/{project}/limits", dependencies=[OWN_ORIGIN])
async def change_limits(
    project: str, request: Request, visitor: Administrator, overview: Overview, directory: Projects
) -> Response:
    """Change the limits of a project, or show its page again with the error beside the field."""
    form = await form_of(request)
    view = await directory.get(project)
    try:
        given = limits_in(form, view.limits)
        await directory.limit(view.id, validated(GivenLimits, given or {}))
    except InvalidRequest as error:
        page = await _page(request, view, visitor, overview, form=form, error=error)
        return HTMLResponse(page, status_code=error.status)
    return RedirectResponse(f"/admin/projects/{view.name}", status_code=303)


@router.post("/projects/{project}/runs", dependencies=[OWN_ORIGIN])
async def move_run(
    project: str,
    request: Request,
    visitor: Administrator,
    overview: Overview,
    directory: Projects,
    run: Annotated[str, Form(max_length=200)] = "",
) -> Response:
    """Move a run into the project."""
    view = await directory.get(project)
    try:
        row = await overview.owned_run(run.strip())
        await service(request, RunManagement).move(row.id, view.id)
    except (Conflict, NotFound) as error:
        page = await _page(request, view, visitor, overview, form={"run": run}, error=error, of="run")
        return HTMLResponse(page, status_code=400 if isinstance(error, NotFound) else error.status)
    return RedirectResponse(f"/admin/projects/{view.name}", status_code=303)


@router.get("/projects/{project}/delete")
async def delete_form(project: str, visitor: Administrator, directory: Projects) -> Response:
    return HTMLResponse(_delete_page(await directory.get(project), visitor, None))


@router.post("/projects/{project}/delete", dependencies=[OWN_ORIGIN])
async def delete_project(
    project: str,
    visitor: Administrator,
    directory: Projects,
    confirmation: Annotated[str, Form(max_length=200)] = "",
) -> Response:
    """Delete a project whose name the visitor has typed."""
    view = await directory.get(project)
    try:
        if confirmation.strip() != view.name:
            raise InvalidRequest(f"type {view.name} to confirm", param="confirmation")
        await directory.delete(view.id)
    except (InvalidRequest, Conflict) as error:
        return HTMLResponse(_delete_page(view, visitor, error), status_code=error.status)
    return RedirectResponse("/admin/projects", status_code=303)


@router.post("/projects/{project}/archive", dependencies=[OWN_ORIGIN])
async def archive_project(
    project: str, request: Request, visitor: Administrator, overview: Overview, directory: Projects
) -> Response:
    return await _set_archived(project, request, visitor, overview, directory, archived=True)


@router.post("/projects/{project}/unarchive", dependencies=[OWN_ORIGIN])
async def unarchive_project(
    project: str, request: Request, visitor: Administrator, overview: Overview, directory: Projects
) -> Response:
    return await _set_archived(project, request, visitor, overview, directory, archived=False)


async def _set_archived(
    project: str,
    request: Request,
    visitor: Visitor,
    overview: OverviewService,
    directory: ProjectDirectory,
    *,
    archived: bool,
) -> Response:
    view = await directory.get(project)
    try:
        await directory.archive(view.id, archived=archived)
    except (InvalidRequest, Conflict) as error:
        page = await _page(request, view, visitor, overview, error=error)
        return HTMLResponse(page, status_code=error.status)
    return RedirectResponse(f"/admin/projects/{view.name}", status_code=303)


async def _list_page(
    request: Request,
    visitor: Visitor,
    directory: ProjectDirectory,
    *,
    form: dict[str, str] | None = None,
    error: BaseRlError | None = None,
) -> str:
    own = visitor.principal.project_id
    found = [one for one in await directory.list_() if own in (None, one.id)]
    values: dict[str, Any] = {
        "projects": found,
        "limits": await _limits_by_project(request, visitor),
        "form": {"name": ""} | (form or {}),
        "errors": {} if error is None else field_errors(error, ("name",)),
    }
    return render("projects.html", visitor=visitor, **values)


async def _page(
    request: Request,
    view: ProjectView,
    visitor: Visitor,
    overview: OverviewService,
    *,
    form: dict[str, str] | None = None,
    error: BaseRlError | None = None,
    of: str = "",
) -> str:
    glances = await overview.board.glances(with_archived=True)
    keys = []
    if visitor.manages:
        kinds = [kind for kind in PrincipalKind if kind is not PrincipalKind.SESSION]
        keys = await service(request, Credentials).page(kinds=kinds, project_id=view.id, limit=_MOST_KEYS)
    errors = {} if error is None else {of: error.message} if of else field_errors(error, tuple(LABELS))
    values: dict[str, Any] = {
        "project": view,
        "runs": [run for run in glances if run.project_id == view.id],
        "others": [run.name for run in glances if run.project_id != view.id] if visitor.is_admin else [],
        "names": {run.id: run.name for run in glances},
        "keys": keys,
        "used": (await _limits_by_project(request, visitor)).get(view.id),
        "form": {"run": ""} | limit_texts(view.limits) | (form or {}),
        "errors": errors,
        "limit_fields": LABELS,
        "now": overview.now(),
    }
    return render("project.html", visitor=visitor, **values)


async def _limits_by_project(request: Request, visitor: Visitor) -> dict[str, LimitsView]:
    found = await service(request, UsageService).visible(visitor.principal)
    return {one.id: one for one in found if one.scope is Scope.PROJECT}


def _delete_page(view: ProjectView, visitor: Visitor, error: BaseRlError | None) -> str:
    values = {"project": view, "problem": None if error is None else error.message}
    return render("delete_project.html", visitor=visitor, **values)
