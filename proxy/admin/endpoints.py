"""The pages under /admin, with their static files. They need OverviewService, SignIn and Settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from math import isfinite
from typing import Annotated, Any, Literal
from urllib.parse import urlencode, urlsplit

import msgspec
from fastapi import APIRouter, Depends, Form, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse

from proxy.admin.boundary import PageRoute
from proxy.admin.sign_in import SignIn, Visitor, check_origin, local_path
from proxy.admin.templating import content_hash, render, static_files
from proxy.admin.token_audit import Colouring, draw_audit
from proxy.admin.transcript import draw
from proxy.contract.states import TrainingState
from proxy.errors import AuthenticationFailed, InvalidRequest, NotFound, PermissionDenied
from proxy.http.address import client_address, is_https
from proxy.http.openapi import EVENT_STREAM
from proxy.http.services import service
from proxy.overview.endpoints import Overview, VersionNumber, last_event_id, server_sent
from proxy.overview.filters import SessionFilter
from proxy.overview.service import OverviewService
from proxy.overview.views import RunSummary, Snapshot
from proxy.runs.switch import RunSwitch
from proxy.settings import Settings

router = APIRouter(prefix="/admin", route_class=PageRoute, include_in_schema=False)

_RECENT_STEPS = 8
_PAGE = 20
# Safe because a static address carries the hash of its content: a changed file has another address.
_FOREVER = "public, max-age=31536000, immutable"
# The id of the table of sessions, which reloads itself when the run changes. Such a reload is no navigation, so it
# must not change the address.
_SESSION_TABLE = "sessions"


def _sign_in(request: Request) -> SignIn:
    return service(request, SignIn)


Entrance = Annotated[SignIn, Depends(_sign_in)]


async def _visitor(request: Request, entrance: Entrance) -> Visitor:
    return await entrance.visitor(request)


Guest = Annotated[Visitor, Depends(_visitor)]


def _own_origin(request: Request) -> None:
    check_origin(request, service(request, Settings).server.public_url)


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


# Signing in and out


@router.get("/login")
async def login_form(next_: Annotated[str, Query(alias="next")] = "/admin") -> Response:
    return HTMLResponse(render("login.html", next=local_path(next_), problem=None))


@router.post("/login", dependencies=[Depends(_own_origin)])
async def login(
    request: Request,
    entrance: Entrance,
    key: Annotated[str, Form(max_length=512)] = "",
    next_: Annotated[str, Form(alias="next", max_length=2048)] = "/admin",
) -> Response:
    try:
        visitor = await entrance.enter(key.strip())
    except (AuthenticationFailed, PermissionDenied) as error:
        problem = "This key is unknown here or was revoked." if error.status == 401 else error.message
        return HTMLResponse(render("login.html", next=local_path(next_), problem=problem), status_code=error.status)
    response = RedirectResponse(local_path(next_), status_code=303)
    entrance.remember(visitor, response, secure=is_https(request))
    return response


@router.post("/logout", dependencies=[Depends(_own_origin)])
async def logout(request: Request, entrance: Entrance) -> Response:
    response = RedirectResponse("/admin/login", status_code=303)
    await entrance.leave(request, response)
    return response


# Runs


@router.get("")
async def runs(overview: Overview, visitor: Guest) -> Response:
    if visitor.is_admin:
        found = (await overview.runs()).runs
        health = await overview.health()
    else:
        found, health = (await overview.run(str(visitor.run_id)),), None
    return HTMLResponse(render("runs.html", visitor=visitor, runs=found, health=health, now=overview.now()))


@router.get("/runs/{run}")
async def run(
    run: str, request: Request, overview: Overview, visitor: Guest, wanted: Wanted, cursor: str = ""
) -> Response:
    """Show a run. Its table of sessions takes the same filters as the sessions page."""
    summary = await _visible(run, overview, visitor)
    values = await _live_values(overview, summary, visitor)
    snapshot = await overview.snapshot(summary.id, after=None)
    sessions = await _session_values(overview, summary, wanted, cursor or None)
    page = render("run.html", **values, **sessions, events=snapshot.events, address=client_address(request))
    return HTMLResponse(page)


@router.get("/runs/{run}/curves")
async def curves(run: str, overview: Overview, visitor: Guest) -> Response:
    summary = await _visible(run, overview, visitor)
    return Response(msgspec.json.encode(await overview.curves(summary.id)), media_type="application/json")


@router.get("/runs/{run}/live")
async def live(run: str, request: Request, overview: Overview, entrance: Entrance, visitor: Guest) -> Response:
    """Stream the changed parts of a run's page as server-sent events: `summary`, `steps` and `activity` carry HTML;
    `tick` tells the page to fetch the curves and the sessions again."""
    summary = await _visible(run, overview, visitor)
    stream = _fragments(overview, entrance, summary.id, visitor, last_event_id(request))
    # nginx buffers responses by default, which would hold events back.
    return StreamingResponse(stream, media_type=EVENT_STREAM, headers={"x-accel-buffering": "no"})


@router.post("/runs/{run}/{switch}", dependencies=[Depends(_own_origin)])
async def switch(run: str, switch: Literal["pause", "resume"], request: Request, visitor: Guest) -> Response:
    if not visitor.is_admin:
        raise PermissionDenied("pausing and resuming a run needs an admin key")
    runs = service(request, RunSwitch)
    name = await (runs.pause(run) if switch == "pause" else runs.resume(run))
    return RedirectResponse(f"/admin/runs/{name}", status_code=303)


@router.get("/runs/{run}/sessions")
async def sessions(
    run: str, request: Request, overview: Overview, visitor: Guest, wanted: Wanted, cursor: str = ""
) -> Response:
    """Show the table of sessions: a whole page for a browser, only the table for htmx."""
    summary = await _visible(run, overview, visitor)
    values = await _session_values(overview, summary, wanted, cursor or None)
    if request.headers.get("hx-request") != "true":
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
    summary = await _visible(run, overview, visitor)
    page = await overview.ledger.revised(summary.id, cursor=cursor or None, limit=_PAGE)
    following = _query({"cursor": page.next_cursor}) if page.next_cursor else None
    values = {"page": page, "is_first": not cursor, "following": following, "now": overview.now()}
    return HTMLResponse(render("revised.html", visitor=visitor, run=summary, **values))


@router.get("/runs/{run}/steps/{version}")
async def step(
    run: str, version: VersionNumber, overview: Overview, visitor: Guest, by: Colouring = Colouring.RATIO
) -> Response:
    """Show a training step. `by` selects the quantity that colours the tokens of the sampled trajectories."""
    summary = await _visible(run, overview, visitor)
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


# Sessions


@router.get("/sessions/{session_id}")
async def session(session_id: str, overview: Overview, visitor: Guest, tokens: bool = False) -> Response:
    found = await overview.session(session_id, with_tokens=tokens)
    if not visitor.may_see(found.session.run_id):
        raise NotFound(f"there is no session {session_id!r}")
    turns = draw(found.turns, found.rewards, found.untrained_turns)
    page = render("session.html", visitor=visitor, view=found, turns=turns, tokens=tokens, now=overview.now())
    return HTMLResponse(page)


@router.get("/static/{path:path}")
async def static(path: str, v: str = "") -> Response:
    """Serve a static file; browsers cache it for good under the address that carries its content's hash."""
    file = static_files().get(path)
    if file is None:
        raise NotFound("there is no such file")
    is_current = v == content_hash(path)
    return FileResponse(file, headers={"cache-control": _FOREVER if is_current else "no-cache"})


@router.get("/{rest:path}")
async def nowhere(rest: str, _visitor: Guest) -> Response:
    if not rest:
        return RedirectResponse("/admin", status_code=303)
    raise NotFound(f"there is no page at /admin/{rest}")


async def _visible(run: str, overview: OverviewService, visitor: Visitor) -> RunSummary:
    """Return the run's summary. Raise NotFound if there is no such run or the visitor may not see it."""
    summary = await overview.run(run)
    # NotFound rather than PermissionDenied: a run key must not learn which other runs exist.
    if not visitor.may_see(summary.id):
        raise NotFound(f"there is no run {run!r}")
    return summary


async def _live_values(overview: OverviewService, summary: RunSummary, visitor: Visitor) -> dict[str, Any]:
    steps = await overview.steps(summary.id, limit=_RECENT_STEPS)
    return {"run": summary, "steps": steps.steps, "visitor": visitor, "now": overview.now()}


async def _session_values(
    overview: OverviewService, summary: RunSummary, wanted: SessionFilter, cursor: str | None
) -> dict[str, Any]:
    page = await overview.sessions(summary.id, wanted, cursor=cursor, limit=_PAGE)
    asked = {name: value for name, value in msgspec.to_builtins(wanted).items() if value is not None}
    return {
        "page": page,
        "wanted": wanted,
        "training_states": tuple(TrainingState),
        "is_first": cursor is None,
        "here": _query(asked | ({"cursor": cursor} if cursor else {})),
        "first": _query(asked),
        "following": _query(asked | {"cursor": page.next_cursor}) if page.next_cursor else None,
    }


def _query(values: Mapping[str, Any]) -> str:
    return f"?{urlencode(values)}" if values else ""


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
