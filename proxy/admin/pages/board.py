"""The first page: all runs that the visitor may see, with filters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, Query, Request
from fastapi.responses import HTMLResponse, Response

from proxy.admin.pages.common import Guest, digest, page_router, query_of
from proxy.admin.templating import render
from proxy.overview.board.views import RunGlance
from proxy.overview.endpoints import Overview
from proxy.overview.views import EngineView

router = page_router()

_PAGE_SIZE = 100
_STATES = {"active": {"active"}, "paused": {"paused"}, "archived": {"archived"}, "": {"active", "paused"}}


class BoardFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of the listed runs. `q` is part of a name, base model or project; `state` is empty for runs that
    are not archived, or a state, or `all`."""

    q: str = ""
    state: str = ""

    @property
    def is_any(self) -> bool:
        return bool(self.q or self.state)

    @property
    def with_archived(self) -> bool:
        return self.state in ("all", "archived")

    def matches(self, run: RunGlance) -> bool:
        is_in_state = self.state == "all" or run.state in _STATES[self.state]
        text = self.q.casefold()
        return is_in_state and any(text in words.casefold() for words in (run.name, run.base_model, run.project))


def _wanted(
    q: Annotated[str, Query(max_length=200)] = "",
    state: Literal["", "active", "paused", "archived", "all"] = "",
) -> BoardFilter:
    return BoardFilter(q=q.strip(), state=state)


Wanted = Annotated[BoardFilter, Depends(_wanted)]


@router.get("")
async def runs(
    request: Request,
    overview: Overview,
    visitor: Guest,
    wanted: Wanted,
    page: Annotated[int, Query(ge=1, le=100_000)] = 1,
) -> Response:
    """Show all runs. The table repeats the request every two seconds; it gets a 204 if nothing has changed."""
    found = [run for run in await overview.board.glances(with_archived=wanted.with_archived) if wanted.matches(run)]
    found = [run for run in found if visitor.may_see(run)]
    health = await overview.recent_health()
    pages = max(1, -(-len(found) // _PAGE_SIZE))
    number = min(page, pages)
    shown = found[(number - 1) * _PAGE_SIZE : number * _PAGE_SIZE]
    values: dict[str, Any] = {
        "shown": shown,
        "engines": engines_by_run(health.engines),
        "problems": health.problems if visitor.is_admin else (),
        "total": len(found),
        "number": number,
        "pages": pages,
        "previous": _address(wanted, number - 1) if number > 1 else None,
        "following": _address(wanted, number + 1) if number < pages else None,
    }
    seen = digest(shown, [engine for engine in health.engines if visitor.is_admin], values["problems"])
    if request.headers.get("x-seen") == seen:
        return Response(status_code=204)
    here = _address(wanted, number)
    page_text = render(
        "runs.html", **values, visitor=visitor, wanted=wanted, here=here, seen=seen, now=overview.now()
    )
    return HTMLResponse(page_text)


def engines_by_run(engines: Iterable[EngineView]) -> dict[str, list[EngineView]]:
    """Return the engines of each run, by the run's name."""
    found: dict[str, list[EngineView]] = {}
    for engine in engines:
        for run in engine.versions:
            found.setdefault(run, []).append(engine)
    return found


def _address(wanted: BoardFilter, number: int) -> str:
    asked = {name: value for name, value in msgspec.to_builtins(wanted).items() if value}
    return query_of(asked | ({"page": number} if number > 1 else {}))
