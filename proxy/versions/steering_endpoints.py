"""Versions changed by people, over HTTP. {run} is a name or an id; keys need the right `CHANGE` (`auth/access.py`).

    POST /api/v1/runs/{run}/versions/{version}/pin     {"reason"} → Standing: engines serve it from now on
    POST /api/v1/runs/{run}/versions/{version}/promote {"reason"} → Standing: it serves, whatever its gates say
    POST /api/v1/runs/{run}/versions/unpin             {"reason"} → Standing: engines serve the newest good one again
    POST /api/v1/runs/{run}/versions/{version}/reject  {"reason"} → Standing: it is never served again
    POST /api/v1/runs/{run}/versions/rollback          {"reason", "to"?, "leave_out_sessions"?} → Standing

409 for a version that cannot be served, or if there is nothing to change.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from proxy.auth.access import Right
from proxy.auth.http import principal
from proxy.contract.policy import MAX_VERSION
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.runs.http import trainers_run
from proxy.runs.service import RunView
from proxy.versions.steering import Decision, Standing, VersionSteering

router = APIRouter(prefix="/api/v1/runs/{run}/versions", tags=["versions"], route_class=StrictRoute)

# A reason is a sentence or two: the event log and the page show it whole.
_LONGEST_REASON = 1000

Version = Annotated[int, Path(ge=0, le=MAX_VERSION)]


class ReasonBody(BaseModel):
    """Why a version is changed. The event log has it."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=_LONGEST_REASON)]


class RollbackBody(ReasonBody):
    """Go back to the version `to`, by default the parent of the version that serves. `leave_out_sessions` leaves
    sessions out of training that a later version answered and that are not trained yet."""

    to: Annotated[int, Field(ge=0, le=MAX_VERSION)] | None = None
    leave_out_sessions: bool = False


_Body = TypeVar("_Body", bound=BaseModel)

_ANSWERS = {200: "The versions that matter after the change."}


@router.post("/unpin", openapi_extra=described(ReasonBody, answers=_ANSWERS))
async def unpin(request: Request, run: str) -> JSONResponse:
    """Let the engines serve the newest good version again; 409 if the run is not pinned."""
    of_run, body = await changed_run(request, run, ReasonBody)
    return _answer(await service(request, VersionSteering).unpin(of_run, await decision_of(request, body)))


@router.post("/rollback", openapi_extra=described(RollbackBody, answers=_ANSWERS))
async def rollback(request: Request, run: str) -> JSONResponse:
    """Go back to an earlier version: engines serve it, and the trainer continues from it."""
    of_run, body = await changed_run(request, run, RollbackBody)
    steering = service(request, VersionSteering)
    decision = await decision_of(request, body)
    standing = await steering.roll_back(of_run, body.to, decision, leave_out_sessions=body.leave_out_sessions)
    return _answer(standing)


@router.post("/{version}/pin", openapi_extra=described(ReasonBody, answers=_ANSWERS))
async def pin(request: Request, run: str, version: Version) -> JSONResponse:
    """Let the engines serve this version until the run is unpinned; training goes on."""
    of_run, body = await changed_run(request, run, ReasonBody)
    return _answer(await service(request, VersionSteering).pin(of_run, version, await decision_of(request, body)))


@router.post("/{version}/promote", openapi_extra=described(ReasonBody, answers=_ANSWERS))
async def promote(request: Request, run: str, version: Version) -> JSONResponse:
    """Let a version serve that waits for its gates; 409 for one that does not wait."""
    of_run, body = await changed_run(request, run, ReasonBody)
    return _answer(await service(request, VersionSteering).promote(of_run, version, await decision_of(request, body)))


@router.post("/{version}/reject", openapi_extra=described(ReasonBody, answers=_ANSWERS))
async def reject(request: Request, run: str, version: Version) -> JSONResponse:
    """Take a version out of service for good. The newest good version becomes the head."""
    of_run, body = await changed_run(request, run, ReasonBody)
    return _answer(await service(request, VersionSteering).reject(of_run, version, await decision_of(request, body)))


async def changed_run(request: Request, run: str, kind: type[_Body]) -> tuple[RunView, _Body]:
    """Return the run that the path names and the body. Raise RunArchived for an archived run."""
    of_run = await trainers_run(request, run, Right.CHANGE)
    of_run.refuse_archived()
    return of_run, validated(kind, await json_body(request))


async def decision_of(request: Request, body: ReasonBody) -> Decision:
    """Return the body's reason with the id of the request's key."""
    return Decision(reason=body.reason, by=(await principal(request)).key_id)


def _answer(standing: Standing) -> JSONResponse:
    content: dict[str, Any] = msgspec.to_builtins(standing)
    return JSONResponse(content)
