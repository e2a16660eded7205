"""The forms that create, clone and change runs, and the buttons that pause, archive and delete them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Depends, Form, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.pages.common import OWN_ORIGIN, Administrator, form_of, page_router, visible_run
from proxy.admin.run_form import FIELDS, MORE, errors_of, merge_patch, settings_of, stored_settings, values_of
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.errors import BaseRlError, Conflict, InvalidRequest, NotFound
from proxy.http.services import service
from proxy.overview.endpoints import Overview
from proxy.overview.service import OverviewService
from proxy.runs.deletion import RunDeletion
from proxy.runs.management import RunManagement
from proxy.runs.served import ServedRuns
from proxy.runs.service import RunDirectory, RunView
from proxy.runs.switch import RunSwitch
from proxy.settings import DEFAULT_PROJECT

router = page_router()

_BESIDE = ("name", "model", "from", "clone", "project")
_FIELD_NAMES = frozenset({*_BESIDE, *(field.name for field in FIELDS)})


def _directory(request: Request) -> RunDirectory:
    return service(request, RunDirectory)


Runs = Annotated[RunDirectory, Depends(_directory)]


@router.get("/new-run")
async def new_run_form(
    visitor: Administrator,
    overview: Overview,
    runs: Runs,
    clone: Annotated[str, Query(max_length=200)] = "",
    begin_from: Annotated[str, Query(alias="from", max_length=200)] = "",
) -> Response:
    """Show the form of a new run; with `clone`, filled with the settings of that run; `from` is a version, such as
    `shop@12`, whose weights the run begins with."""
    form = {"from": begin_from} | values_of({})
    if clone:
        source = await runs.by_name_or_id(clone)
        form = values_of(stored_settings(source.settings))
        form |= {"name": f"{source.name[:59]}-copy", "model": source.base_model, "clone": source.name}
    return HTMLResponse(await _form_page(visitor, overview, form, {}))


@router.post("/new-run", dependencies=[OWN_ORIGIN])
async def create_run(request: Request, visitor: Administrator, overview: Overview, runs: Runs) -> Response:
    """Create the run, or show the form again with the error beside its field."""
    form = await form_of(request)
    management = service(request, RunManagement)
    name, clone = form.get("name", "").strip(), form.get("clone", "")
    try:
        settings = settings_of(form)
        if clone:
            before = stored_settings((await runs.by_name_or_id(clone)).settings)
            made = await management.clone(clone, name, merge_patch(before, settings))
        else:
            model, begin_from = form.get("model", "").strip(), form.get("from", "").strip()
            project = form.get("project", "").strip() or DEFAULT_PROJECT
            made = await management.create(
                name, model or None, settings, begin_from=begin_from or None, project=project
            )
    except (InvalidRequest, Conflict, NotFound) as error:
        if isinstance(error, NotFound) and error.param != "project":
            raise
        page = await _form_page(visitor, overview, form, _errors(error))
        return HTMLResponse(page, status_code=400 if isinstance(error, NotFound) else error.status)
    return RedirectResponse(f"/admin/runs/{made.name}", status_code=303)


@router.get("/runs/{run}/settings")
async def settings_form(run: str, visitor: Administrator, overview: Overview, runs: Runs) -> Response:
    view = await runs.by_name_or_id(run)
    form = values_of(stored_settings(view.settings))
    return HTMLResponse(await _form_page(visitor, overview, form, {}, of=view))


@router.post("/runs/{run}/settings", dependencies=[OWN_ORIGIN])
async def change_settings(
    run: str, request: Request, visitor: Administrator, overview: Overview, runs: Runs
) -> Response:
    """Change the settings of a run, or show the form again with the error beside its field."""
    form = await form_of(request)
    view = await runs.by_name_or_id(run)
    try:
        patch = merge_patch(stored_settings(view.settings), settings_of(form))
        await service(request, RunManagement).change(view.id, patch)
    except (InvalidRequest, Conflict) as error:
        page = await _form_page(visitor, overview, form, _errors(error), of=view)
        return HTMLResponse(page, status_code=error.status)
    return RedirectResponse(f"/admin/runs/{view.name}", status_code=303)


@router.post("/runs/{run}/delete", dependencies=[OWN_ORIGIN])
async def delete_run(
    run: str,
    request: Request,
    visitor: Administrator,
    overview: Overview,
    runs: Runs,
    confirmation: Annotated[str, Form(max_length=200)] = "",
) -> Response:
    """Delete a run whose name the visitor has typed."""
    view = await runs.by_name_or_id(run)
    try:
        if confirmation.strip() != view.name:
            raise InvalidRequest(f"type {view.name} to confirm", param="confirmation")
        # As over the API: an archived run takes no calls, whatever engines still hold.
        is_served = not view.is_archived and service(request, ServedRuns).is_placed(view.id)
        await service(request, RunDeletion).delete(view.id, confirm=view.name, is_served=is_served)
    except (InvalidRequest, Conflict) as error:
        page = await _delete_page(view, visitor, overview, error)
        return HTMLResponse(page, status_code=error.status)
    return RedirectResponse("/admin", status_code=303)


@router.get("/runs/{run}/delete")
async def delete_form(run: str, visitor: Administrator, overview: Overview, runs: Runs) -> Response:
    return HTMLResponse(await _delete_page(await runs.by_name_or_id(run), visitor, overview, None))


@router.post("/runs/{run}/{switch}", dependencies=[OWN_ORIGIN])
async def switch(
    run: str,
    switch: Literal["pause", "resume", "archive", "unarchive"],
    request: Request,
    visitor: Administrator,
    overview: Overview,
) -> Response:
    summary = await visible_run(run, overview, visitor)
    name = await getattr(service(request, RunSwitch), switch)(summary.id)
    return RedirectResponse(f"/admin/runs/{name}", status_code=303)


async def _form_page(
    visitor: Visitor,
    overview: OverviewService,
    form: dict[str, str],
    errors: dict[str, str],
    *,
    of: RunView | None = None,
) -> str:
    """Render the form of a new run, or of the settings of the run `of`."""
    # A request that no form of ours sent may lack fields.
    form = dict.fromkeys((*_BESIDE, *(field.name for field in FIELDS), MORE), "") | form
    glances = await overview.board.glances(with_archived=True)
    models = sorted({run.base_model for run in glances if visitor.may_see(run)})
    projects = sorted({run.project for run in glances if visitor.may_see(run)})
    values: dict[str, Any] = {"form": form, "errors": errors, "fields": FIELDS, "models": models, "run": of}
    values["projects"] = projects
    return render("run_form.html", visitor=visitor, **values)


async def _delete_page(view: RunView, visitor: Visitor, overview: OverviewService, error: BaseRlError | None) -> str:
    summary = await overview.run(view.id)
    return render("delete_run.html", visitor=visitor, run=summary, problem=None if error is None else error.message)


def _errors(error: InvalidRequest | Conflict | NotFound) -> dict[str, str]:
    if isinstance(error, InvalidRequest):
        return errors_of(error, _FIELD_NAMES)
    return {error.param if error.param in ("name", "project") else "": error.message}
