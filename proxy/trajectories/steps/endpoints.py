"""Steps for those who make them again, in MessagePack.

    GET /api/v1/runs/{run}/steps/{version}/batch    StepBatch

{run} is a name or an id. Needs the run's trainer key or an admin key.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from proxy.http.messages import message_response
from proxy.runs.http import trainers_run
from proxy.trajectories.steps.service import StepService

router = APIRouter(prefix="/api/v1/runs/{run}/steps", tags=["trainer"])


@router.get("/{version}/batch")
async def batch(request: Request, run: str, version: int) -> Response:
    """What the step that made the version trained on, with what it was made with."""
    service: StepService = request.app.state.steps
    return message_response(await service.batch(await trainers_run(request, run), version))
