"""The event log over HTTP.

GET  /api/v1/events    {"events": [LoggedEvent…], "next_cursor"}, newest first; ?run=, ?kind= and ?cursor= as usual
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from proxy.auth.access import Principal, Right, require_right
from proxy.http.strict_route import StrictRoute
from proxy.overview.endpoints import Limit, Overview, Who, json_answer, readable_run
from proxy.overview.log.views import EventFilter
from proxy.overview.service import OverviewService

router = APIRouter(prefix="/api/v1", tags=["events"], route_class=StrictRoute)

Kind = Annotated[str | None, Query(max_length=48)]


@router.get("/events")
async def events(
    who: Who,
    overview: Overview,
    run: str | None = None,
    kind: Kind = None,
    cursor: str | None = None,
    limit: Limit = 50,
) -> Response:
    """List what happened, newest first.

    `run` is a name or an id; the key of a run or a project sees the events of its runs alone. `kind` is a whole kind,
    such as `run.created`, or a domain, such as `run`.
    """
    require_right(who, Right.READ)
    wanted = EventFilter(kind=kind or None, run_ids=await _listed_runs(run, who, overview))
    return json_answer(await overview.log.page(wanted, cursor=cursor, limit=limit))


async def _listed_runs(run: str | None, who: Principal, overview: OverviewService) -> tuple[str, ...] | None:
    """Return the ids of the runs whose events are listed; None for all events."""
    wanted = run or who.run_id
    if wanted is not None:
        return (await readable_run(wanted, who, overview),)
    return None if who.project_id is None else await overview.run_ids(who.project_id)
