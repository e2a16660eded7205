"""Policy versions over HTTP.

    GET  /api/v1/runs/{run}/head        Head, in MessagePack: the version to train from; 410 if the run is archived
    POST /api/v1/runs/{run}/versions    CommitRequest → CommitReply, in MessagePack; 409 if the head has moved or a
                                        lease has expired
    POST /api/v1/runs/{run}/versions/{version}/saved
                                        WeightsReference → CommitReply, in MessagePack: a version that was committed
                                        from memory, or offered, is on the disk now; 409 if it was taken back
                                        meanwhile
    POST /api/v1/runs/{run}/versions/take-back
                                        → Head, in MessagePack: takes the head back if it is not on the disk
    GET  /api/v1/runs/{run}/versions    {"versions": [VersionView…], "head", "serving", "pinned", "promoted"}, in
                                        JSON, newest first
    POST /api/v1/runs/{run}/versions/prune
                                        PruneRequest → PruneReply, in MessagePack: the weights that may be deleted

{run} is a name or an id. They need the right `TRAIN` in the run, the list `READ_TRAINING` (`auth/access.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse, Response

from proxy.auth.access import Right
from proxy.contract.claim import CommitRequest
from proxy.contract.policy import MAX_VERSION, PruneRequest, WeightsReference
from proxy.http.messages import message_body, message_response
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.runs.http import trained_run, trainers_run
from proxy.runs.served import ServedRuns
from proxy.versions.retention import WeightRetention
from proxy.versions.saving import UnsavedVersions
from proxy.versions.service import VersionService
from proxy.versions.steering import VersionSteering

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["trainer"], route_class=StrictRoute)


def versions_of(request: Request) -> VersionService:
    return service(request, VersionService)


@router.get("/head")
async def head(request: Request, run: str) -> Response:
    """Return the version to train from. The answer has the formats of weights and the context length only for a run
    that an engine of this process serves."""
    of_run = await trained_run(request, run)
    found = await versions_of(request).head(of_run)
    served = service(request, ServedRuns)
    formats = served.weight_formats(found.run_id)
    context = await served.context_length(of_run) if served.is_placed(found.run_id) else None
    return message_response(msgspec.structs.replace(found, formats=formats, context_length=context))


@router.post("/versions")
async def commit(request: Request, run: str) -> Response:
    """Create the next version and consume the claims' trajectories."""
    of_run = await trainers_run(request, run)
    commit_request = await message_body(request, CommitRequest)
    reply = await versions_of(request).commit(of_run, commit_request)
    if commit_request.offer is not None and await versions_of(request).is_wanted(of_run, reply.version):
        engines = service(request, ServedRuns).engines(of_run.id)
        reply = msgspec.structs.replace(reply, engines=engines)
    return message_response(reply)


@router.post("/versions/{version}/saved")
async def saved(request: Request, run: str, version: Annotated[int, Path(ge=0, le=MAX_VERSION)]) -> Response:
    """Record that a version's directory is on the disk, and consume its claims."""
    of_run = await trainers_run(request, run)
    weights = await message_body(request, WeightsReference)
    return message_response(await service(request, UnsavedVersions).save(of_run, version, weights))


@router.post("/versions/take-back")
async def take_back(request: Request, run: str) -> Response:
    """Take the head back if it is not on the disk, and return the head."""
    of_run = await trainers_run(request, run)
    await service(request, UnsavedVersions).take_back(of_run)
    return message_response(await versions_of(request).head(of_run))


@router.post("/versions/prune")
async def prune(request: Request, run: str) -> Response:
    """Mark old versions' weights as removed, and return those of the present ones that may be deleted."""
    of_run = await trainers_run(request, run)
    prune_request = await message_body(request, PruneRequest)
    return message_response(await service(request, WeightRetention).prune(of_run, prune_request))


@router.get("/versions")
async def versions(request: Request, run: str) -> JSONResponse:
    """Return all versions, newest first, and which of them is the head, which serves and which is pinned."""
    of_run = await trainers_run(request, run, Right.READ_TRAINING)
    listed = await versions_of(request).list_(of_run)
    standing = await service(request, VersionSteering).standing(of_run)
    which = {
        "head": standing.head,
        "serving": standing.serving,
        "pinned": standing.pinned,
        "promoted": standing.promoted,
    }
    return JSONResponse({"versions": msgspec.to_builtins(listed), **which})
