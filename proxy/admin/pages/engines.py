"""The page of engines: what each holds, its load and its problem."""

from __future__ import annotations

import msgspec
from fastapi import Request
from fastapi.responses import HTMLResponse, Response

from proxy.admin.pages.common import Guest, digest, page_router
from proxy.admin.templating import render
from proxy.errors import PermissionDenied
from proxy.overview.endpoints import Overview

router = page_router()


@router.get("/engines")
async def engines(request: Request, overview: Overview, visitor: Guest) -> Response:
    """Show all engines. The page repeats the request every two seconds; it gets a 204 if nothing has changed."""
    if not visitor.is_admin:
        raise PermissionDenied("engines are shown to admin keys: they serve the runs of others too")
    found = overview.engines()
    # Leases and answers are renewed all the time. The browser counts the seconds since the last answer that it knows.
    seen = digest([msgspec.structs.replace(engine, lease=None, seen_at=None) for engine in found])
    if request.headers.get("x-seen") == seen:
        return Response(status_code=204)
    return HTMLResponse(render("engines.html", visitor=visitor, engines=found, seen=seen, now=overview.now()))
