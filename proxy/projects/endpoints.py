"""Projects over HTTP, under /api/v1. An admin key may do everything; the key of a project may read it.

GET    /api/v1/projects               {"projects": [ProjectView…]}; with the key of one project, that one
POST   /api/v1/projects               {"name"} → 201 ProjectView
GET    /api/v1/projects/{project}     ProjectView; {project} is a name or an id
PATCH  /api/v1/projects/{project}     {"archived"} → ProjectView
DELETE /api/v1/projects/{project}     204; only for a project without runs; its keys go with it
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, StrictBool

from proxy.auth.access import Principal, Right, require_right
from proxy.auth.http import principal
from proxy.errors import InvalidRequest, NotFound
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.projects.service import ProjectDirectory, ProjectView
from proxy.settings import GivenLimits, ProjectName

router = APIRouter(prefix="/api/v1/projects", tags=["projects"], route_class=StrictRoute)

Who = Annotated[Principal, Depends(principal)]


def directory_of(request: Request) -> ProjectDirectory:
    return service(request, ProjectDirectory)


Directory = Annotated[ProjectDirectory, Depends(directory_of)]


class NewProjectBody(BaseModel):
    """A new project."""

    model_config = ConfigDict(extra="forbid")

    name: ProjectName


class ChangedProjectBody(BaseModel):
    """A change of a project. An archived project takes no runs. `limits` replaces the limits of all its runs
    together; null or `{}` removes them."""

    model_config = ConfigDict(extra="forbid")

    archived: StrictBool | None = None
    limits: GivenLimits | None = None


@router.get("")
async def projects(who: Who, directory: Directory) -> Response:
    """List the projects; for the key of a project, that project alone."""
    require_right(who, Right.SEE_PROJECT)
    if who.project_id is not None:
        return _answer({"projects": [await directory.get(who.project_id)]})
    return _answer({"projects": await directory.list_()})


@router.post("", status_code=201, openapi_extra=described(NewProjectBody, answers={201: "The new project."}))
async def create_project(request: Request, who: Who, directory: Directory) -> Response:
    """Create a project; 409 if the name is taken."""
    require_right(who, Right.ADMINISTRATE)
    body = validated(NewProjectBody, await json_body(request))
    return _answer(await directory.create(body.name), 201)


@router.get("/{project}")
async def project(project: str, who: Who, directory: Directory) -> Response:
    return _answer(await visible_project(project, who, directory))


@router.patch("/{project}", openapi_extra=described(ChangedProjectBody, answers={200: "The project as changed."}))
async def change_project(project: str, request: Request, who: Who, directory: Directory) -> Response:
    """Change the limits of a project; archive it, unless a run of it is not archived (409), or unarchive it."""
    require_right(who, Right.ADMINISTRATE)
    body = validated(ChangedProjectBody, await json_body(request))
    if "limits" not in body.model_fields_set and body.archived is None:
        raise InvalidRequest("give `archived`, `limits` or both", param="archived")
    if body.archived is not None:
        view = await directory.archive(project, archived=body.archived)
    if "limits" in body.model_fields_set:
        view = await directory.limit(project, body.limits or GivenLimits())
    return _answer(view)


@router.delete("/{project}", status_code=204)
async def delete_project(project: str, who: Who, directory: Directory) -> Response:
    """Delete a project without runs, and its keys; 409 for any other."""
    require_right(who, Right.ADMINISTRATE)
    await directory.delete(project)
    return Response(status_code=204)


async def visible_project(name_or_id: str, who: Principal, directory: ProjectDirectory) -> ProjectView:
    """Return a project that the key may read. Raise NotFound for any other."""
    require_right(who, Right.SEE_PROJECT)
    if who.project_id is None:
        return await directory.get(name_or_id)
    own = await directory.get(who.project_id)
    if name_or_id not in (own.id, own.name):
        raise NotFound(f"there is no project {name_or_id!r}", param="project")
    return own


async def permitted_project_id(asked: str | None, who: Principal, directory: ProjectDirectory) -> str | None:
    """Return the id of the project that is asked for, which must be the key's own if it has one; the key's project,
    if any, where none is asked for. Raise NotFound."""
    if who.project_id is None:
        return None if asked is None else (await directory.get(asked)).id
    own = await directory.get(who.project_id)
    if asked not in (None, own.id, own.name):
        raise NotFound(f"there is no project {asked!r}", param="project")
    return own.id


def _answer(view: Any, status: int = 200) -> JSONResponse:
    return JSONResponse(msgspec.to_builtins(view), status, {"cache-control": "no-store"})
