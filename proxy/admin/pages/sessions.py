"""The pages of sessions: the table of a run's sessions with its filters, revised rewards, and one session."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, Response

from proxy.admin.pages.common import PAGE_SIZE, Guest, is_fragment, page_router, query_of, visible_run
from proxy.admin.templating import render
from proxy.admin.transcript import draw
from proxy.contract.states import TrainingState
from proxy.errors import InvalidRequest, NotFound
from proxy.overview.endpoints import Overview
from proxy.overview.filters import SessionFilter
from proxy.overview.service import OverviewService
from proxy.overview.views import RunSummary

router = page_router()

# The id of the table of sessions, which reloads itself when the run changes. Such a reload is no navigation, so it
# must not change the address.
_SESSION_TABLE = "sessions"


def _number(text: str, param: str) -> float | None:
    """Parse a number of a filter; an empty form field is None. Raise InvalidRequest for anything else."""
    if not text.strip():
        return None
    try:
        # The page prints the typographic minus sign, and many keyboards type a decimal comma.
        value = float(text.replace("−", "-").replace(",", "."))
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise InvalidRequest(f"{param}: {text[:40]!r} is not a number", param=param)
    return value


def _wanted(
    state: Literal["", "open", "ended"] = "",
    training: str = "",
    group: str = "",
    min_reward: str = "",
    max_reward: str = "",
) -> SessionFilter:
    """Read the session filters from the query; an empty form field means any. Raise InvalidRequest for a value that
    cannot be used."""
    if training and training not in set(TrainingState):
        raise InvalidRequest(
            f"training: {training[:40]!r} is not one of {', '.join(TrainingState)}", param="training"
        )
    return SessionFilter(
        state=state or None,
        training=training or None,
        group=group.strip() or None,
        min_reward=_number(min_reward, "min_reward"),
        max_reward=_number(max_reward, "max_reward"),
    )


Wanted = Annotated[SessionFilter, Depends(_wanted)]


@router.get("/runs/{run}/sessions")
async def sessions(
    run: str, request: Request, overview: Overview, visitor: Guest, wanted: Wanted, cursor: str = ""
) -> Response:
    """Show the table of sessions: a whole page for a browser, only the table for htmx."""
    summary = await visible_run(run, overview, visitor)
    values = await session_values(overview, summary, wanted, cursor or None)
    if not is_fragment(request):
        return HTMLResponse(render("sessions.html", visitor=visitor, run=summary, now=overview.now(), **values))
    fragment = HTMLResponse(render("_sessions.html", visitor=visitor, run=summary, now=overview.now(), **values))
    if request.headers.get("hx-trigger") != _SESSION_TABLE:
        # The filters also stand on the run's own page; reloading the pushed address must show the same page again.
        page = f"/admin/runs/{summary.name}"
        shown_on = page if urlsplit(request.headers.get("hx-current-url", "")).path == page else f"{page}/sessions"
        fragment.headers["hx-push-url"] = shown_on + values["here"]
    return fragment


@router.get("/runs/{run}/revised")
async def revised(run: str, overview: Overview, visitor: Guest, cursor: str = "") -> Response:
    """List the sessions whose rewards changed after a step trained on them."""
    summary = await visible_run(run, overview, visitor)
    page = await overview.ledger.revised(summary.id, cursor=cursor or None, limit=PAGE_SIZE)
    following = query_of({"cursor": page.next_cursor}) if page.next_cursor else None
    values = {"page": page, "is_first": not cursor, "following": following, "now": overview.now()}
    return HTMLResponse(render("revised.html", visitor=visitor, run=summary, **values))


@router.get("/sessions/{session_id}")
async def session(session_id: str, overview: Overview, visitor: Guest, tokens: bool = False) -> Response:
    found = await overview.session(session_id, with_tokens=tokens)
    if not visitor.may_see(await overview.owner_of(found.session.run_id)):
        raise NotFound(f"there is no session {session_id!r}")
    turns = draw(found.turns, found.rewards, found.untrained_turns)
    page = render("session.html", visitor=visitor, view=found, turns=turns, tokens=tokens, now=overview.now())
    return HTMLResponse(page)


async def session_values(
    overview: OverviewService, summary: RunSummary, wanted: SessionFilter, cursor: str | None
) -> dict[str, Any]:
    page = await overview.sessions(summary.id, wanted, cursor=cursor, limit=PAGE_SIZE)
    asked = {name: value for name, value in msgspec.to_builtins(wanted).items() if value is not None}
    return {
        "page": page,
        "wanted": wanted,
        "training_states": tuple(TrainingState),
        "is_first": cursor is None,
        "here": query_of(asked | ({"cursor": cursor} if cursor else {})),
        "first": query_of(asked),
        "following": query_of(asked | {"cursor": page.next_cursor}) if page.next_cursor else None,
    }
