"""Engines over HTTP, under /api/v1, for admin keys. {engine} is a name or an id.

GET    /api/v1/engines                     {"engines": [EngineView…]}, oldest first
POST   /api/v1/engines                     {"name", "url", "base_model"?, "kind"?, "run"?} → 201 EngineView
POST   /api/v1/engines/{engine}/drain      EngineView; ?force=true even if a run is then without an engine
POST   /api/v1/engines/{engine}/resume     EngineView
DELETE /api/v1/engines/{engine}            204; ?force=true even if it is not drained
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from proxy.auth.access import Right, require_right
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.overview.endpoints import Who, json_answer
from proxy.overview.views import EngineList, EngineView
from proxy.runs.service import RunDirectory
from proxy.serving.admission import EngineAdmission
from proxy.serving.directory import EngineDirectory
from proxy.settings.engine import EngineName

router = APIRouter(prefix="/api/v1", tags=["engines"], route_class=StrictRoute)

_LONGEST = 4096  # the longest path of a file system


def directory_of(request: Request) -> EngineDirectory:
    return service(request, EngineDirectory)


Directory = Annotated[EngineDirectory, Depends(directory_of)]


class NewEngineBody(BaseModel):
    """A running engine. `base_model` is by default that of `run`, or the one that the engine reports; `run` is the
    name or the id of the one run that it serves, by default any run of its base model."""

    model_config = ConfigDict(extra="forbid")

    name: EngineName
    url: Annotated[str, StringConstraints(pattern=r"^https?://[^/]", max_length=_LONGEST)]
    base_model: Annotated[str, Field(min_length=1, max_length=_LONGEST)] | None = None
    kind: Literal["sglang", "embedded"] = "sglang"
    run: str | None = None


@router.get("/engines")
async def engines(who: Who, directory: Directory) -> Response:
    """Return all engines, oldest first."""
    require_right(who, Right.ADMINISTRATE)
    return json_answer(EngineList(engines=directory.list_()))


@router.post("/engines", status_code=201, openapi_extra=described(NewEngineBody, answers={201: "The new engine."}))
async def add_engine(request: Request, who: Who, directory: Directory) -> Response:
    """Add a running engine, after checking that it is ready and fits its base model. Every proxy of the store uses it
    within its health interval; 409 if the name or the address is taken."""
    require_right(who, Right.ADMINISTRATE)
    return json_answer(await add_checked(request, directory, await json_body(request)), status=201)


async def add_checked(request: Request, directory: EngineDirectory, value: Any) -> EngineView:
    """Add the engine that `value` describes, a `NewEngineBody`, after checking it. Raise InvalidRequest, NotFound for
    an unknown run, and Conflict."""
    body = validated(NewEngineBody, value)
    url = body.url.rstrip("/")
    run = None if body.run is None else await service(request, RunDirectory).by_name_or_id(body.run)
    base_model = await service(request, EngineAdmission).base_model(url, body.base_model, run)
    return await directory.add(body.name, url, base_model=base_model, kind=body.kind, run=run)


@router.post("/engines/{engine}/drain")
async def drain(engine: str, who: Who, directory: Directory, force: bool = False) -> Response:
    """Send no new calls to an engine; those under way end as they would. Repeating it does nothing."""
    require_right(who, Right.ADMINISTRATE)
    return json_answer(await directory.drain(engine, force=force))


@router.post("/engines/{engine}/resume")
async def resume(engine: str, who: Who, directory: Directory) -> Response:
    """Use a drained engine again."""
    require_right(who, Right.ADMINISTRATE)
    return json_answer(await directory.resume(engine))


@router.delete("/engines/{engine}", status_code=204)
async def remove(engine: str, who: Who, directory: Directory, force: bool = False) -> Response:
    """Remove a drained engine that was added; 409 for one that is in use or in the configuration."""
    require_right(who, Right.ADMINISTRATE)
    await directory.remove(engine, force=force)
    return Response(status_code=204)
