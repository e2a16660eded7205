"""The page of engines: what each holds, its load and its problem; forms that add, drain, resume and remove them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import Depends, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.pages.common import OWN_ORIGIN, Administrator, digest, field_errors, form_of, page_router
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.http.services import service
from proxy.overview.endpoints import Overview
from proxy.overview.service import OverviewService
from proxy.overview.views import EngineView
from proxy.serving.directory import EngineDirectory, ForceNeeded
from proxy.serving.endpoints import add_checked

router = page_router()

_FIELDS = ("name", "url", "kind", "base_model", "run")


def _directory(request: Request) -> EngineDirectory:
    return service(request, EngineDirectory)


Directory = Annotated[EngineDirectory, Depends(_directory)]


@router.get("/engines")
async def engines(request: Request, overview: Overview, visitor: Administrator) -> Response:
    """Show all engines. The page repeats the request every two seconds; it gets a 204 if nothing has changed."""
    if request.headers.get("x-seen") == _seen(overview):
        return Response(status_code=204)
    return HTMLResponse(_page(overview, visitor))


@router.get("/new-engine")
async def new_engine_form(visitor: Administrator, overview: Overview) -> Response:
    return HTMLResponse(await _form_page(visitor, overview, {}, {}))


@router.post("/new-engine", dependencies=[OWN_ORIGIN])
async def add_engine(request: Request, visitor: Administrator, overview: Overview, directory: Directory) -> Response:
    """Add a running engine, or show the form again with the error beside its field."""
    form = await form_of(request)
    given = {name: text.strip() for name, text in form.items() if name in _FIELDS and text.strip()}
    try:
        await add_checked(request, directory, given)
    except (InvalidRequest, Conflict, NotFound) as error:
        # The only thing that can be missing is the run of the form.
        errors = {"run": error.message} if isinstance(error, NotFound) else field_errors(error, _FIELDS)
        page = await _form_page(visitor, overview, form, errors)
        return HTMLResponse(page, status_code=400 if isinstance(error, NotFound) else error.status)
    return RedirectResponse("/admin/engines", status_code=303)


@router.get("/engines/{engine}/remove")
async def remove_form(engine: str, overview: Overview, visitor: Administrator) -> Response:
    """Ask whether an engine is to be removed."""
    view = _engine(overview, engine)
    return HTMLResponse(_confirmation(visitor, view, "remove", force=view.state != "drained"))


@router.post("/engines/{engine}/{change}", dependencies=[OWN_ORIGIN])
async def change_engine(
    engine: str,
    change: Literal["drain", "resume", "remove"],
    overview: Overview,
    directory: Directory,
    visitor: Administrator,
    force: Annotated[bool, Form()] = False,
) -> Response:
    """Drain, resume or remove an engine. If that would end service for a run, show why and ask again."""
    try:
        if change == "drain":
            await directory.drain(engine, force=force)
        elif change == "resume":
            await directory.resume(engine)
        else:
            await directory.remove(engine, force=force)
    except ForceNeeded as error:
        page = _confirmation(visitor, _engine(overview, engine), change, force=True, problem=error.message)
        return HTMLResponse(page, status_code=error.status)
    except Conflict as error:
        return HTMLResponse(_page(overview, visitor, problem=error.message), status_code=error.status)
    return RedirectResponse("/admin/engines", status_code=303)


def _engine(overview: OverviewService, name: str) -> EngineView:
    for view in overview.engines():
        if view.name == name:
            return view
    raise NotFound(f"there is no engine {name!r}")


def _page(overview: OverviewService, visitor: Visitor, *, problem: str | None = None) -> str:
    values = {"engines": overview.engines(), "seen": _seen(overview), "now": overview.now(), "problem": problem}
    return render("engines.html", visitor=visitor, **values)


def _seen(overview: OverviewService) -> str:
    # Leases and answers are renewed all the time. The browser counts the seconds since the last answer that it knows.
    return digest([msgspec.structs.replace(engine, lease=None, seen_at=None) for engine in overview.engines()])


def _confirmation(
    visitor: Visitor, engine: EngineView, change: str, *, force: bool, problem: str | None = None
) -> str:
    values = {"engine": engine, "change": change, "force": force, "problem": problem}
    return render("engine_confirmation.html", visitor=visitor, **values)


async def _form_page(
    visitor: Visitor, overview: OverviewService, form: dict[str, str], errors: dict[str, str]
) -> str:
    # A request that no form of ours sent may lack fields.
    form = dict.fromkeys(_FIELDS, "") | form
    runs = await overview.board.glances()
    models = sorted({run.base_model for run in runs})
    return render("engine_form.html", visitor=visitor, form=form, errors=errors, runs=runs, models=models)
