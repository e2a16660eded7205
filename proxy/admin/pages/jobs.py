"""The pages of background jobs: their kinds, dead jobs with their errors, schedules, and one job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, Form, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.pages.common import OWN_ORIGIN, PAGE_SIZE, Administrator, digest, page_router, query_of
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.contract.states import JobState
from proxy.errors import Conflict
from proxy.http.services import service
from proxy.jobs.service import JobService
from proxy.overview.endpoints import Overview
from proxy.overview.filters import Cursor
from proxy.overview.service import OverviewService

router = page_router()


class JobFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the form above the jobs; empty means any."""

    kind: str
    state: Literal["", "waiting", "running", "failed", "done", "dead", "cancelled"]

    @property
    def query(self) -> dict[str, str]:
        return {name: text for name, text in msgspec.to_builtins(self).items() if text}


def _wanted(
    kind: Annotated[str, Query(max_length=64)] = "",
    state: Literal["", "waiting", "running", "failed", "done", "dead", "cancelled"] = "",
) -> JobFilter:
    return JobFilter(kind=kind.strip(), state=state)


Wanted = Annotated[JobFilter, Depends(_wanted)]


def _jobs(request: Request) -> JobService:
    return service(request, JobService)


Jobs = Annotated[JobService, Depends(_jobs)]


@router.get("/jobs")
async def jobs(
    request: Request,
    service_: Jobs,
    overview: Overview,
    visitor: Administrator,
    wanted: Wanted,
    cursor: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Show kinds, schedules and jobs. The page repeats the request every two seconds; it gets a 204 if nothing has
    changed."""
    found = await service_.page(
        kind=wanted.kind or None,
        state=JobState(wanted.state) if wanted.state else None,
        below=Cursor.decode(cursor).key if cursor else None,
        limit=PAGE_SIZE + 1,
    )
    last = found[PAGE_SIZE - 1] if len(found) > PAGE_SIZE else None
    following = {} if last is None else {"cursor": Cursor(at=last.created_at, key=last.id).encode()}
    values: dict[str, Any] = {
        "jobs": found[:PAGE_SIZE],
        "kinds": await service_.kinds(),
        "schedules": await service_.schedules(),
        "wanted": wanted,
        "states": tuple(JobState),
        "here": query_of(wanted.query | ({"cursor": cursor} if cursor else {})),
        "first": query_of(wanted.query) if cursor else None,
        "following": query_of(wanted.query | following) if following else None,
    }
    # The age of the oldest job grows all the time; a page that changed for it alone would take the visitor's
    # selection of text every two seconds.
    kinds = [msgspec.structs.replace(kind, oldest_seconds=0.0) for kind in values["kinds"]]
    seen = digest(values["jobs"], kinds, values["schedules"])
    if request.headers.get("x-seen") == seen:
        return Response(status_code=204)
    return HTMLResponse(render("jobs.html", **values, visitor=visitor, seen=seen, now=overview.now()))


@router.post("/jobs/retry", dependencies=[OWN_ORIGIN])
async def retry_dead(
    service_: Jobs, _visitor: Administrator, kind: Annotated[str, Form(max_length=64)] = ""
) -> Response:
    """Retry the dead jobs of a kind, or all of them."""
    await service_.retry_dead(kind=kind.strip() or None, run_id=None)
    return RedirectResponse("/admin/jobs", status_code=303)


@router.get("/jobs/{job_id}")
async def job(job_id: str, service_: Jobs, overview: Overview, visitor: Administrator) -> Response:
    return HTMLResponse(await _job_page(job_id, service_, overview, visitor, problem=None))


@router.post("/jobs/{job_id}/{change}", dependencies=[OWN_ORIGIN])
async def change_job(
    job_id: str, change: Literal["retry", "cancel"], service_: Jobs, overview: Overview, visitor: Administrator
) -> Response:
    """Retry or cancel a job; a job whose state does not allow that is shown with the reason."""
    try:
        await (service_.retry(job_id) if change == "retry" else service_.cancel(job_id))
    except Conflict as error:
        page = await _job_page(job_id, service_, overview, visitor, problem=error.message)
        return HTMLResponse(page, status_code=error.status)
    return RedirectResponse(f"/admin/jobs/{job_id}", status_code=303)


async def _job_page(
    job_id: str, service_: JobService, overview: OverviewService, visitor: Visitor, *, problem: str | None
) -> str:
    view = await service_.show(job_id)
    return render("job.html", visitor=visitor, job=view, problem=problem, now=overview.now())
