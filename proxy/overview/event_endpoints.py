"""The event log over HTTP.

GET  /api/v1/events    {"events": [LoggedEvent…], "next_cursor"}, newest first; ?run=, ?kind= and ?cursor= as usual
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from proxy.auth.http import require
from proxy.auth.service import PrincipalKind
from proxy.http.strict_route import StrictRoute
from proxy.overview.endpoints import Limit, Overview, Who, json_answer, readable_run
from proxy.overview.log.views import EventFilter

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

    `run` is a name or an id; the key of one run sees its own alone. `kind` is a whole kind, such as `run.created`, or
    a domain, such as `run`.
    """
    require(who, PrincipalKind.ADMIN, PrincipalKind.RUN)
    wanted = run if who.run_id is None else run or str(who.run_id)
    run_ids = None if wanted is None else (await readable_run(wanted, who, overview),)
    return json_answer(
        await overview.log.page(EventFilter(kind=kind or None, run_ids=run_ids), cursor=cursor, limit=limit)
    )
