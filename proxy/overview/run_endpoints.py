"""Runs over HTTP, under /api/v1. `auth/access.py` has the rights of each kind of key.

GET    /api/v1/runs                        {"runs": [RunSummary…]}; with the key of one run, its own
POST   /api/v1/runs                        {"name", "model", "project"?, "settings"?} → 201 RunDetail; with "from":
                                           "NAME@12" in place of "model" it begins from that version of another run
GET    /api/v1/runs/{run}                  RunDetail: RunSummary and "settings"; {run} is a name or an id
PATCH  /api/v1/runs/{run}                  {"settings": merge patch, "project"?} → RunDetail
POST   /api/v1/runs/{run}/clone            {"name", "settings"?} → 201 RunDetail
POST   /api/v1/runs/{run}/pause, /resume   RunSummary after the change; ?reason= of a pause is shown
POST   /api/v1/runs/{run}/archive, /unarchive   RunSummary after the change
DELETE /api/v1/runs/{run}                  204, or 202 while rows are removed; ?confirm=NAME for a run with data
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from proxy.auth.access import Principal, Right, require_right
from proxy.errors import InvalidRequest, NotFound
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.overview.endpoints import Overview, Who, json_answer, permitted_run_id, readable_run
from proxy.overview.service import OverviewService
from proxy.overview.views import RunList
from proxy.projects.service import ProjectDirectory
from proxy.runs.deletion import RunDeletion
from proxy.runs.management import RunManagement
from proxy.runs.served import ServedRuns
from proxy.runs.service import RunDirectory
from proxy.runs.switch import RunSwitch
from proxy.settings import DEFAULT_PROJECT

router = APIRouter(prefix="/api/v1", tags=["runs"], route_class=StrictRoute)

_LONGEST_MODEL = 4096  # the longest path of a file system
_LONGEST_VERSION = 80  # a run's name has at most 64 characters, a version at most 10

Reason = Annotated[str | None, Query(min_length=1, max_length=2000)]
Confirmation = Annotated[str | None, Query(max_length=64)]
Name = Annotated[str, Field(min_length=1, max_length=64)]
SettingsOfRun = Annotated[dict[str, Any], Field(default_factory=dict)]


def management_of(request: Request) -> RunManagement:
    return service(request, RunManagement)


def switch_of(request: Request) -> RunSwitch:
    return service(request, RunSwitch)


Management = Annotated[RunManagement, Depends(management_of)]
Switch = Annotated[RunSwitch, Depends(switch_of)]


class NewRunBody(BaseModel):
    """A new run on a base model: a directory or a Hugging Face id. With `from`, such as `shop@12`, its version 0 has
    the weights of that version of another run, whose base model it has too. `settings` has the keys of the section
    `[run]`. `project` is a name or an id: default is the key's own project, or `default`.
    """

    model_config = ConfigDict(extra="forbid")

    name: Name
    model: Annotated[str | None, Field(min_length=1, max_length=_LONGEST_MODEL)] = None
    begin_from: Annotated[str | None, Field(alias="from", min_length=1, max_length=_LONGEST_VERSION)] = None
    project: Name | None = None
    settings: SettingsOfRun


class ChangedRunBody(BaseModel):
    """A merge patch of the run's settings: null sets a key to its default. `name` and `model` never change; they may
    be sent as they are. `project` moves the run, which needs an admin key."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    model: str | None = None
    project: Name | None = None
    settings: SettingsOfRun


class ClonedRunBody(BaseModel):
    """A new run with the base model and the settings of the run in the path, `settings` merged into them."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    settings: SettingsOfRun


@router.get("/runs")
async def runs(who: Who, overview: Overview) -> Response:
    """Return all runs; for a key of one run, that run alone; for a key of a project, its runs."""
    require_right(who, Right.LIST)
    if who.run_id is not None:
        return json_answer(RunList(runs=(await overview.run(str(who.run_id)),)))
    return json_answer(await overview.runs(who.project_id))


@router.post("/runs", status_code=201, openapi_extra=described(NewRunBody, answers={201: "The new run."}))
async def create_run(request: Request, who: Who, overview: Overview, management: Management) -> Response:
    """Create a run. Its model's tokenizer and chat template are loaded before the run is stored, so that a model that
    cannot answer calls is a 400; 409 if the name is taken. The files of a version to begin from are read and
    checked."""
    require_right(who, Right.CHANGE)
    body = validated(NewRunBody, await json_body(request))
    project = await _project_for(who, body.project, service(request, ProjectDirectory))
    if body.begin_from is not None and who.project_id is not None:
        # Weights of another project must not reach this one.
        await permitted_run_id(body.begin_from.partition("@")[0], who, overview, Right.CHANGE)
    run = await management.create(body.name, body.model, body.settings, begin_from=body.begin_from, project=project)
    return await _detail(request, overview, run.id, status=201)


@router.get("/runs/{run}")
async def run(run: str, request: Request, who: Who, overview: Overview) -> Response:
    return await _detail(request, overview, await readable_run(run, who, overview))


@router.patch("/runs/{run}", openapi_extra=described(ChangedRunBody, answers={200: "The run after the change."}))
async def change_run(run: str, request: Request, who: Who, overview: Overview, management: Management) -> Response:
    """Change settings of a run. Calls see them within two seconds. A run that the configuration declares takes its
    settings from there again at the next start."""
    summary = await overview.run(await permitted_run_id(run, who, overview, Right.CHANGE))
    body = validated(ChangedRunBody, await json_body(request))
    _check_same("name", body.name, summary.name)
    _check_same("model", body.model, summary.base_model)
    moves = body.project not in (None, summary.project)
    if moves:
        require_right(who, Right.ADMINISTRATE)
    changed = await management.change(summary.id, body.settings)
    if moves and body.project is not None:
        changed = await management.move(summary.id, body.project)
    return await _detail(request, overview, changed.id)


@router.post(
    "/runs/{run}/clone", status_code=201, openapi_extra=described(ClonedRunBody, answers={201: "The new run."})
)
async def clone_run(run: str, request: Request, who: Who, overview: Overview, management: Management) -> Response:
    """Create a run with another run's base model and settings. It begins at version 0, the base model."""
    source = await permitted_run_id(run, who, overview, Right.CHANGE)
    body = validated(ClonedRunBody, await json_body(request))
    cloned = await management.clone(source, body.name, body.settings)
    return await _detail(request, overview, cloned.id, status=201)


@router.delete("/runs/{run}", status_code=204)
async def delete_run(
    run: str, request: Request, who: Who, overview: Overview, confirm: Confirmation = None
) -> Response:
    """Delete a run with its keys, sessions, versions and weights. It cannot be undone.

    A run with sessions, claims or steps must be archived (409), and its name repeated as `confirm` (400). 409 for a
    run that an engine serves, that a trainer works on, or that other runs begin from. 202: the run is gone, and what
    belonged to it is still being removed.
    """
    run_id = await permitted_run_id(run, who, overview, Right.CHANGE)
    found = await service(request, RunDirectory).by_id(run_id)
    # An archived run takes no calls. Engines may learn of that a second later, and hold nothing that is needed then.
    is_served = not found.is_archived and service(request, ServedRuns).is_placed(found.id)
    is_removed = await service(request, RunDeletion).delete(found.id, confirm=confirm, is_served=is_served)
    return Response(status_code=204 if is_removed else 202)


@router.post("/runs/{run}/pause")
async def pause(run: str, who: Who, overview: Overview, switch: Switch, reason: Reason = None) -> Response:
    """Pause training of a run. A trainer key may pause its own run, for example after a failure, and not
    resume it."""
    run_id = await permitted_run_id(run, who, overview, Right.PAUSE)
    await switch.pause(run_id, reason=reason)
    return json_answer(await overview.run(run_id))


@router.post("/runs/{run}/resume")
async def resume(run: str, who: Who, overview: Overview, switch: Switch) -> Response:
    run_id = await permitted_run_id(run, who, overview, Right.CHANGE)
    await switch.resume(run_id)
    return json_answer(await overview.run(run_id))


@router.post("/runs/{run}/archive")
async def archive(run: str, who: Who, overview: Overview, switch: Switch) -> Response:
    """Archive a run: it keeps its data. Calls, new sessions and claims of trajectories get a 410."""
    run_id = await permitted_run_id(run, who, overview, Right.CHANGE)
    await switch.archive(run_id)
    return json_answer(await overview.run(run_id))


@router.post("/runs/{run}/unarchive")
async def unarchive(run: str, who: Who, overview: Overview, switch: Switch) -> Response:
    """Make an archived run active again."""
    run_id = await permitted_run_id(run, who, overview, Right.CHANGE)
    await switch.unarchive(run_id)
    return json_answer(await overview.run(run_id))


async def _detail(request: Request, overview: OverviewService, run_id: str, *, status: int = 200) -> Response:
    summary = await overview.run(run_id)
    settings = (await service(request, RunDirectory).by_id(run_id)).settings
    detail = {
        **msgspec.to_builtins(summary),
        "settings": settings.model_dump(mode="json", exclude={"name", "model", "begin_from"}),
    }
    return json_answer(detail, status=status)


async def _project_for(who: Principal, asked: str | None, directory: ProjectDirectory) -> str:
    """Return the project of a new run, checked against the scope of the key."""
    if who.project_id is None:
        return asked or DEFAULT_PROJECT
    own = await directory.get(who.project_id)
    if asked not in (None, own.id, own.name):
        raise NotFound(f"there is no project {asked!r}", param="project")
    return own.id


def _check_same(key: str, given: str | None, present: str) -> None:
    """Raise InvalidRequest if a change would rename the run or give it another base model."""
    if given not in (None, present):
        raise InvalidRequest(
            f"{key}: a run keeps its {key}, which is {present!r}; begin another run with `base-rl runs create`",
            param=key,
        )
