"""Batches of committed steps over HTTP, for replay, in MessagePack.

    GET /api/v1/runs/{run}/steps/{version}/batch    StepBatch

{run} is a name or an id. Needs the run's trainer key or an admin key.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from proxy.contract.policy import MAX_VERSION
from proxy.http.messages import message_response
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.runs.http import trainers_run
from proxy.steps.service import StepService

router = APIRouter(prefix="/api/v1/runs/{run}/steps", tags=["trainer"], route_class=StrictRoute)


@router.get("/{version}/batch")
async def batch(request: Request, run: str, version: Annotated[int, Path(ge=0, le=MAX_VERSION)]) -> Response:
    """Return the trajectories that the version's step trained on, and the inputs of the step."""
    of_run = await trainers_run(request, run)
    return message_response(await service(request, StepService).batch(of_run, version))
