"""The page of a run's judges: what they have scored and used, how far they agree with people, and the judging of
sessions that ended before."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from proxy.admin.calibration import calibration
from proxy.admin.pages.common import OWN_ORIGIN, Guest, page_router, query_of
from proxy.admin.sign_in import Visitor
from proxy.admin.templating import render
from proxy.auth.access import Right, may_change
from proxy.errors import InvalidRequest
from proxy.http.services import service
from proxy.judges.directory import MOST_SESSIONS, JudgeDirectory
from proxy.judges.views import JudgeView
from proxy.overview.review.service import REVIEWERS
from proxy.runs.http import permitted_run
from proxy.runs.service import RunDirectory, RunView

router = page_router()

_LONGEST_SOURCE = 128


def _directory(request: Request) -> JudgeDirectory:
    return service(request, JudgeDirectory)


Judges = Annotated[JudgeDirectory, Depends(_directory)]


async def _readable(run: str, request: Request, visitor: Guest) -> RunView:
    return await permitted_run(service(request, RunDirectory), visitor.principal, Right.READ, run)


async def _changeable(run: str, request: Request, visitor: Guest) -> RunView:
    return await permitted_run(service(request, RunDirectory), visitor.principal, Right.CHANGE, run)


Readable = Annotated[RunView, Depends(_readable)]
Changeable = Annotated[RunView, Depends(_changeable)]


@router.get("/runs/{run}/judges")
async def judges(
    run: Readable,
    directory: Judges,
    visitor: Guest,
    source: Annotated[str, Query(max_length=_LONGEST_SOURCE)] = "",
    enqueued: Annotated[int | None, Query(ge=0, le=MOST_SESSIONS)] = None,
    more: bool = False,
) -> Response:
    """Show the judges beside the rewards of a `source`, which is a reviewer if none is named. `enqueued` and `more`
    are the result of a form of ours."""
    sources = await directory.sources(run)
    reviewer = next((one for one in sources if one.startswith(REVIEWERS)), None)
    compared = source.strip() or reviewer or next(iter(sources), "")
    values: dict[str, Any] = {
        "shown": [await _shown(view, run, directory, compared) for view in await directory.list_(run)],
        "source": compared,
        "sources": sources,
        "enqueued": enqueued,
        "more": more,
        "may_change": may_change(visitor.principal, run),
    }
    return HTMLResponse(render("judges.html", visitor=visitor, run=run, **values))


@router.get("/runs/{run}/judges/{judge}/rejudge")
async def rejudge_form(run: Changeable, judge: str, directory: Judges, visitor: Guest) -> Response:
    """Ask whether a judge is to score the sessions that it has not scored in its present form."""
    return HTMLResponse(await _rejudge_page(run, judge, directory, visitor))


@router.post("/runs/{run}/judges/{judge}/rejudge", dependencies=[OWN_ORIGIN])
async def rejudge(run: Changeable, judge: str, directory: Judges, visitor: Guest) -> Response:
    """Let a judge score the other sessions."""
    try:
        made = await directory.rejudge(run, judge, None)
    except InvalidRequest as error:
        page = await _rejudge_page(run, judge, directory, visitor, problem=error.message)
        return HTMLResponse(page, status_code=error.status)
    result = {"enqueued": made.enqueued} | ({"more": "true"} if made.more else {})
    return RedirectResponse(f"/admin/runs/{run.name}/judges{query_of(result)}", status_code=303)


async def _shown(view: JudgeView, run: RunView, directory: JudgeDirectory, source: str) -> dict[str, Any]:
    """Return a judge for the page, with its agreement with the rewards of `source`."""
    found: dict[str, Any] = {"judge": view, "agreement": None, "picture": None}
    # A judge whose prompt cannot be read has no present form to compare.
    if source and view.fingerprint is not None:
        settings = run.settings.judges[view.name]
        agreement = await directory.agreement(run, view.name, source)
        picture = calibration(agreement.calibration, low=settings.low, high=settings.high)
        found |= {"agreement": agreement, "picture": picture}
    return found


async def _rejudge_page(
    run: RunView, name: str, directory: JudgeDirectory, visitor: Visitor, *, problem: str | None = None
) -> str:
    count = 0
    if problem is None:
        try:
            count = await directory.unscored(run, name)
        except InvalidRequest as error:
            problem = error.message
    view = next(judge for judge in await directory.list_(run) if judge.name == name)
    attempts = view.scored + view.failed + view.abstained
    tokens = view.prompt_tokens + view.completion_tokens
    values = {
        "judge": view,
        "count": count,
        "is_cut": count == MOST_SESSIONS,
        "tokens": round(count * tokens / attempts) if attempts else None,
        "cost": count * view.cost / attempts if attempts and view.cost is not None else None,
        "problem": problem,
    }
    return render("rejudge.html", visitor=visitor, run=run, **values)
