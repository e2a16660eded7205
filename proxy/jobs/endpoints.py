"""Jobs over HTTP, for admin keys.

GET  /api/v1/jobs                   {"jobs": [JobView…], "next_cursor"}, newest first
GET  /api/v1/jobs/kinds             {"kinds": [KindView…], "schedules": [ScheduleView…]}
POST /api/v1/jobs/retry             {"retried"}: the dead jobs of a kind, a run, or all
GET  /api/v1/jobs/{job_id}          JobView
POST /api/v1/jobs/{job_id}/retry    JobView; 409 for a job that waits, runs or is done
POST /api/v1/jobs/{job_id}/cancel   JobView; 409 for a job that is done or cancelled
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse

from proxy.auth.access import Right, require_right
from proxy.auth.http import principal
from proxy.contract.states import JobState
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.jobs.service import JobService
from proxy.overview.filters import Cursor
from proxy.runs.service import RunDirectory


async def _require_admin(request: Request) -> None:
    require_right(await principal(request), Right.ADMINISTRATE)


router = APIRouter(
    prefix="/api/v1/jobs", tags=["jobs"], route_class=StrictRoute, dependencies=[Depends(_require_admin)]
)


def jobs_of(request: Request) -> JobService:
    return service(request, JobService)


Jobs = Annotated[JobService, Depends(jobs_of)]
Kind = Annotated[str | None, Query(max_length=64)]


@router.get("")
async def jobs(
    request: Request,
    service_: Jobs,
    kind: Kind = None,
    state: JobState | None = None,
    run: str | None = None,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> JSONResponse:
    """List jobs, newest first. Filters: `kind`, `state`, and `run` (a name or an id)."""
    after = None if cursor is None else Cursor.decode(cursor).key
    run_id = await _run_id(request, run)
    found = await service_.page(kind=kind, state=state, run_id=run_id, below=after, limit=limit + 1)
    last = found[limit - 1] if len(found) > limit else None
    following = None if last is None else Cursor(at=last.created_at, key=last.id).encode()
    return JSONResponse({"jobs": msgspec.to_builtins(found[:limit]), "next_cursor": following})


@router.get("/kinds")
async def kinds(service_: Jobs) -> JSONResponse:
    """Show every kind with its jobs by state and the age of the oldest due one, and the schedules."""
    return JSONResponse(
        {
            "kinds": msgspec.to_builtins(await service_.kinds()),
            "schedules": msgspec.to_builtins(await service_.schedules()),
        }
    )


@router.post("/retry")
async def retry_dead(request: Request, service_: Jobs, kind: Kind = None, run: str | None = None) -> JSONResponse:
    """Retry dead jobs, a thousand at most: those of a kind, of a run, or all. `retried` is their number."""
    run_id = await _run_id(request, run)
    return JSONResponse({"retried": await service_.retry_dead(kind=kind, run_id=run_id)})


@router.get("/{job_id}")
async def job(service_: Jobs, job_id: str) -> JSONResponse:
    """Show one job with its payload, its result and the error of its last attempt."""
    return _answer(await service_.show(job_id))


@router.post("/{job_id}/retry")
async def retry(service_: Jobs, job_id: str) -> JSONResponse:
    """Make a dead, cancelled or failed job due now, with all of its attempts."""
    return _answer(await service_.retry(job_id))


@router.post("/{job_id}/cancel")
async def cancel(service_: Jobs, job_id: str) -> JSONResponse:
    """Cancel a job. One that runs is interrupted within a third of its lease; its effect in the store is refused at
    once."""
    return _answer(await service_.cancel(job_id))


async def _run_id(request: Request, run: str | None) -> str | None:
    return None if run is None else (await service(request, RunDirectory).by_name_or_id(run)).id


def _answer(view: Any) -> JSONResponse:
    return JSONResponse(msgspec.to_builtins(view))
