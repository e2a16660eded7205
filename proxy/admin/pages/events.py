"""The page of the event log."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import Depends, Query
from fastapi.responses import HTMLResponse, Response

from proxy.admin.pages.common import Guest, page_router, query_of, visible_run
from proxy.admin.templating import render
from proxy.overview.endpoints import Overview
from proxy.overview.log.views import EventFilter

router = page_router()

_PAGE_SIZE = 50


class LogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the form above the log; empty means any."""

    run: str
    kind: str


def _wanted(
    run: Annotated[str, Query(max_length=200)] = "", kind: Annotated[str, Query(max_length=48)] = ""
) -> LogFilter:
    return LogFilter(run=run.strip(), kind=kind.strip())


Wanted = Annotated[LogFilter, Depends(_wanted)]


@router.get("/events")
async def events(
    overview: Overview, visitor: Guest, wanted: Wanted, cursor: Annotated[str, Query(max_length=32)] = ""
) -> Response:
    """Show what happened, newest first, in the runs that the visitor may see."""
    run_ids: tuple[str, ...] | None = None
    if wanted.run:
        run_ids = ((await visible_run(wanted.run, overview, visitor)).id,)
    elif not visitor.is_admin:
        glances = await overview.board.glances(with_archived=True)
        run_ids = tuple(run.id for run in glances if visitor.may_see(run))
    page = await overview.log.page(
        EventFilter(kind=wanted.kind or None, run_ids=run_ids), cursor=cursor or None, limit=_PAGE_SIZE
    )
    asked = {name: value for name, value in msgspec.to_builtins(wanted).items() if value}
    text = render(
        "events.html",
        visitor=visitor,
        page=page,
        wanted=wanted,
        now=overview.now(),
        newest=query_of(asked) if cursor else None,
        following=query_of(asked | {"cursor": page.next_cursor}) if page.next_cursor else None,
    )
    return HTMLResponse(text)
