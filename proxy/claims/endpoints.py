"""Claims over HTTP, for trainers, in MessagePack.

    POST /api/v1/runs/{run}/claims                   ClaimRequest → ClaimedBatch; waits up to `wait_s`
    GET  /api/v1/runs/{run}/claims                   {"claims": [ClaimView…]}, in JSON, leased ones first
    POST /api/v1/runs/{run}/claims/{id}/heartbeat    LeaseReply; 409 once the lease has passed
    POST /api/v1/runs/{run}/claims/{id}/release      204; 409 for a claim that is not leased
    POST /api/v1/runs/{run}/claims/abandoned         AbandonedProcess → ReleasedClaims: all claims of a process

{run} is a name or an id. Needs the right `TRAIN` in the run, the list `READ_TRAINING` (`auth/access.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from proxy.auth.access import Right
from proxy.claims.service import ClaimService
from proxy.contract.claim import AbandonedProcess, ClaimRequest
from proxy.contract.identifiers import ClaimId
from proxy.http.messages import message_body, message_response
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.runs.http import trained_run, trainers_run

router = APIRouter(prefix="/api/v1/runs/{run}/claims", tags=["trainer"], route_class=StrictRoute)


def claims_of(request: Request) -> ClaimService:
    return service(request, ClaimService)


@router.post("")
async def claim(request: Request, run: str) -> Response:
    """Lease trajectories in whole groups. If there are too few, the batch is empty and `claim_id` is null; 410 for an
    archived run."""
    of_run = await trained_run(request, run)
    wish = await message_body(request, ClaimRequest)
    return message_response(await claims_of(request).claim(of_run, wish, abandoned=request.is_disconnected))


@router.get("")
async def claims(request: Request, run: str, limit: Annotated[int, Query(ge=1, le=200)] = 50) -> JSONResponse:
    """List the live claims and the outcome of earlier ones."""
    of_run = await trainers_run(request, run, Right.READ_TRAINING)
    listed = await claims_of(request).list_(of_run, limit=limit)
    return JSONResponse({"claims": msgspec.to_builtins(listed)})


@router.post("/abandoned")
async def abandoned(request: Request, run: str) -> Response:
    """Release all claims of a trainer's process: one known to be dead, or the caller itself as it ends."""
    of_run = await trainers_run(request, run)
    dead = await message_body(request, AbandonedProcess)
    return message_response(await claims_of(request).release_abandoned(of_run, dead.process))


@router.post("/{claim_id}/heartbeat")
async def heartbeat(request: Request, run: str, claim_id: str) -> Response:
    """Extend the lease."""
    of_run = await trainers_run(request, run)
    return message_response(await claims_of(request).heartbeat(of_run, ClaimId(claim_id)))


@router.post("/{claim_id}/release", status_code=204)
async def release(request: Request, run: str, claim_id: str) -> Response:
    """Release the claim: its trajectories are claimable at once."""
    of_run = await trainers_run(request, run)
    await claims_of(request).release(of_run, ClaimId(claim_id))
    return Response(status_code=204)
