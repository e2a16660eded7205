"""The pages of one run: its live figures, and its training steps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse

from proxy.admin.pages.common import Entrance, Guest, page_router, visible_run
from proxy.admin.pages.sessions import Wanted, session_values
from proxy.admin.sign_in import SignIn, Visitor
from proxy.admin.templating import render
from proxy.admin.token_audit import Colouring, draw_audit
from proxy.http.address import client_address
from proxy.http.openapi import EVENT_STREAM
from proxy.http.services import service
from proxy.overview.endpoints import Overview, VersionNumber, last_event_id, server_sent
from proxy.overview.service import OverviewService
from proxy.overview.views import RunSummary, Snapshot
from proxy.usage.service import UsageService

router = page_router()

_RECENT_STEPS = 8


@router.get("/runs/{run}")
async def run(
    run: str, request: Request, overview: Overview, visitor: Guest, wanted: Wanted, cursor: str = ""
) -> Response:
    """Show a run. Its table of sessions takes the same filters as the sessions page."""
    summary = await visible_run(run, overview, visitor)
    values = await _live_values(overview, summary, visitor)
    snapshot = await overview.snapshot(summary.id, after=None)
    sessions = await session_values(overview, summary, wanted, cursor or None)
    values["limits"] = await service(request, UsageService).binding(
        visitor.principal, run_id=summary.id, project=summary.project
    )
    page = render("run.html", **values, **sessions, events=snapshot.events, address=client_address(request))
    return HTMLResponse(page)


@router.get("/runs/{run}/curves")
async def curves(run: str, overview: Overview, visitor: Guest) -> Response:
    summary = await visible_run(run, overview, visitor)
    return Response(msgspec.json.encode(await overview.curves(summary.id)), media_type="application/json")


@router.get("/runs/{run}/live")
async def live(run: str, request: Request, overview: Overview, entrance: Entrance, visitor: Guest) -> Response:
    """Stream the changed parts of a run's page as server-sent events: `summary`, `steps` and `activity` carry HTML;
    `tick` tells the page to fetch the curves and the sessions again."""
    summary = await visible_run(run, overview, visitor)
    stream = _fragments(overview, entrance, summary.id, visitor, last_event_id(request))
    # nginx buffers responses by default, which would hold events back.
    return StreamingResponse(stream, media_type=EVENT_STREAM, headers={"x-accel-buffering": "no"})


@router.get("/runs/{run}/steps/{version}")
async def step(
    run: str, version: VersionNumber, overview: Overview, visitor: Guest, by: Colouring = Colouring.RATIO
) -> Response:
    """Show a training step. `by` selects the quantity that colours the tokens of the sampled trajectories."""
    summary = await visible_run(run, overview, visitor)
    found = await overview.step(summary.id, version)
    tokens = await overview.step_tokens(summary.id, version)
    page = render(
        "step.html",
        visitor=visitor,
        run=summary,
        view=found,
        drawn=draw_audit(tokens.turns, by),
        colouring=by.value,
        now=overview.now(),
    )
    return HTMLResponse(page)


async def _live_values(overview: OverviewService, summary: RunSummary, visitor: Visitor) -> dict[str, Any]:
    steps = await overview.steps(summary.id, limit=_RECENT_STEPS)
    return {"run": summary, "steps": steps.steps, "visitor": visitor, "now": overview.now()}


async def _fragments(
    overview: OverviewService, entrance: SignIn, run_id: str, visitor: Visitor, after: int | None
) -> AsyncIterator[bytes]:
    async for snapshot in overview.snapshots(run_id, after=after):
        if not await entrance.is_signed_in(visitor):
            return
        if snapshot is None:
            # A comment line: it stops gateways from closing an idle connection.
            yield b": still here\n\n"
        else:
            yield await _fragment(overview, snapshot, visitor)


async def _fragment(overview: OverviewService, snapshot: Snapshot, visitor: Visitor) -> bytes:
    values = await _live_values(overview, snapshot.run, visitor)
    recent = await overview.snapshot(snapshot.run.id, after=None)
    parts = [
        server_sent("summary", render("_summary.html", **values)),
        server_sent("steps", render("_steps.html", **values)),
        server_sent("activity", render("_activity.html", events=recent.events, **values)),
        server_sent("tick", str(snapshot.last_event_id), event_id=snapshot.last_event_id),
    ]
    return b"".join(parts)
