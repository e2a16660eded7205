"""The trainer's side of trajectories, in MessagePack: claim, keep, give back.

    POST /api/v1/runs/{run}/claims                   ClaimRequest → ClaimedBatch; waits up to `wait_s`
    POST /api/v1/runs/{run}/claims/{id}/heartbeat    LeaseReply; 409 once the lease has passed
    POST /api/v1/runs/{run}/claims/{id}/release      204; 409 for a claim that is not leased

{run} is a name or an id. Needs the run's trainer key or an admin key.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from proxy.contract.claim import ClaimRequest
from proxy.contract.identifiers import ClaimId
from proxy.http.messages import message_body, message_response
from proxy.runs.http import trainers_run
from proxy.trajectories.claims.service import ClaimService

router = APIRouter(prefix="/api/v1/runs/{run}/claims", tags=["trainer"])


def claims_of(request: Request) -> ClaimService:
    service: ClaimService = request.app.state.claims
    return service


@router.post("")
async def claim(request: Request, run: str) -> Response:
    """Leases trajectories in whole groups. Nothing to claim is an empty batch with `claim_id` null."""
    of_run = await trainers_run(request, run)
    wish = await message_body(request, ClaimRequest)
    return message_response(await claims_of(request).claim(of_run, wish, abandoned=request.is_disconnected))


@router.post("/{claim_id}/heartbeat")
async def heartbeat(request: Request, run: str, claim_id: str) -> Response:
    """Renews the lease."""
    of_run = await trainers_run(request, run)
    return message_response(await claims_of(request).heartbeat(of_run, ClaimId(claim_id)))


@router.post("/{claim_id}/release", status_code=204)
async def release(request: Request, run: str, claim_id: str) -> Response:
    """Gives the trajectories back at once."""
    of_run = await trainers_run(request, run)
    await claims_of(request).release(of_run, ClaimId(claim_id))
    return Response(status_code=204)
