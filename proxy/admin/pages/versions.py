"""The page of a run's versions: states, what gates have found, a form for changes, and what changed between two."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Form, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.confidence import picture
from proxy.admin.pages.common import OWN_ORIGIN, Administrator, Guest, page_router, visible_run
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.contract.policy import MAX_VERSION
from proxy.errors import BaseRlError, Conflict, InvalidRequest, NotFound
from proxy.gates.holds import VersionHolds
from proxy.gates.service import GateService
from proxy.http.services import service
from proxy.overview.endpoints import Overview
from proxy.overview.service import OverviewService
from proxy.overview.views import RunSummary
from proxy.runs.service import RunDirectory
from proxy.versions.service import VersionService
from proxy.versions.steering import Decision, VersionSteering

router = page_router()

_SHOWN = 40
_FOUND = 6
_COMPARED = 10
_LONGEST_REASON = 1000

Change = Literal["promote", "reject", "pin", "unpin", "rollback"]
Version = Annotated[int, Query(ge=0, le=MAX_VERSION)]


@router.get("/runs/{run}/versions")
async def versions(
    run: str,
    request: Request,
    overview: Overview,
    visitor: Guest,
    before: Version | None = None,
    after: Version | None = None,
) -> Response:
    """Show the versions; with `before` and `after`, what changed between them as well."""
    summary = await visible_run(run, overview, visitor)
    diff, problem = None, None
    if before is not None and after is not None:
        try:
            diff = await overview.compare_versions(summary.id, before, after, limit=_COMPARED)
        except (InvalidRequest, NotFound) as error:
            problem = error.message
    page = await _page(request, overview, summary, visitor, diff=diff, diff_problem=problem)
    return HTMLResponse(page)


@router.post("/runs/{run}/versions", dependencies=[OWN_ORIGIN])
async def change(
    run: str,
    request: Request,
    overview: Overview,
    visitor: Administrator,
    change: Annotated[Change, Form()],
    reason: Annotated[str, Form(max_length=_LONGEST_REASON)] = "",
    version: Annotated[int | None, Form(ge=0, le=MAX_VERSION)] = None,
) -> Response:
    """Promote, reject, pin or unpin a version, or go back to it, with a reason."""
    summary = await visible_run(run, overview, visitor)
    try:
        await _make(request, summary, change, version, reason.strip(), visitor)
    except (InvalidRequest, Conflict, NotFound) as error:
        page = await _page(request, overview, summary, visitor, error=error)
        return HTMLResponse(page, status_code=error.status)
    return RedirectResponse(f"/admin/runs/{summary.name}/versions", status_code=303)


async def _make(
    request: Request, summary: RunSummary, change: Change, version: int | None, reason: str, visitor: Visitor
) -> None:
    if not reason:
        raise InvalidRequest("give a reason: the event log has it", param="reason")
    of_run = await service(request, RunDirectory).by_id(summary.id)
    of_run.refuse_archived()
    steering, decision = service(request, VersionSteering), Decision(reason=reason, by=visitor.principal.key_id)
    if change == "unpin":
        await steering.unpin(of_run, decision)
    elif change == "rollback":
        await steering.roll_back(of_run, version, decision, leave_out_sessions=False)
    elif version is None:
        raise InvalidRequest("give the number of a version", param="version")
    else:
        await getattr(steering, change)(of_run, version, decision)


async def _page(
    request: Request,
    overview: OverviewService,
    summary: RunSummary,
    visitor: Visitor,
    *,
    error: BaseRlError | None = None,
    **shown: Any,
) -> str:
    of_run = await service(request, RunDirectory).by_id(summary.id)
    findings = await service(request, GateService).newest_findings(of_run, _FOUND)
    drawn = [
        (version, [(finding, picture(finding.evidence)) for finding in version.findings]) for version in findings
    ]
    listed = await service(request, VersionService).list_(of_run)
    values = {
        "run": summary,
        "release": of_run.settings.release,
        "standing": await service(request, VersionSteering).standing(of_run),
        "versions": listed[:_SHOWN],
        "hidden": max(0, len(listed) - _SHOWN),
        "drawn": drawn,
        "holds": await service(request, VersionHolds).list_(of_run),
        "problem": None if error is None else error.message,
        "now": overview.now(),
        "diff": None,
        "diff_problem": None,
        **shown,
    }
    return render("versions.html", visitor=visitor, **values)
