"""The operating API under /api/v1: read sessions, turns, rewards, steps, curves and health.

Responses are the views of `overview/views.py` as JSON; lists are `{"<things>": […], "next_cursor"}`, and `?cursor=`
with that cursor gives the next page. A key that may read a run (`auth/access.py`) may read all of it.

    GET  /api/v1/health                          Health
    GET  /api/v1/runs/{run}/sessions             {"sessions": [SessionItem…], "next_cursor"}; {run} is a name or an id
    GET  /api/v1/rewards, /runs/{run}/rewards    see overview/rewards/endpoints.py
    GET  /api/v1/runs/{run}/steps                {"steps": [StepItem…], "next_cursor"}
    GET  /api/v1/runs/{run}/steps/{version}      StepView
    GET  /api/v1/runs/{run}/steps/{version}/tokens   StepTokens
    GET  /api/v1/runs/{run}/versions/diff        VersionDiff; ?from=3&to=7
    GET  /api/v1/runs/{run}/curves               Curves
    GET  /api/v1/runs/{run}/events               server-sent events: `snapshot`, Snapshot
    GET  /api/v1/sessions/{id}                   SessionView; ?tokens=1 adds ids and log-probabilities
    GET  /api/v1/turns/{id}                      TurnView; ?tokens=1 as above

Runs themselves are in `overview/run_endpoints.py`, keys in `keys/endpoints.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse

from proxy.auth.access import Principal, Right, covers, require_right, require_run, unknown_run
from proxy.auth.http import principal
from proxy.contract.policy import MAX_VERSION
from proxy.contract.states import SessionState, TrainingState
from proxy.errors import InvalidRequest, NotFound
from proxy.http.openapi import EVENT_STREAM, described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.overview.filters import SessionFilter
from proxy.overview.service import OverviewService

router = APIRouter(prefix="/api/v1", route_class=StrictRoute)

_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def overview_of(request: Request) -> OverviewService:
    return service(request, OverviewService)


Who = Annotated[Principal, Depends(principal)]
Overview = Annotated[OverviewService, Depends(overview_of)]
VersionNumber = Annotated[int, PathParameter(ge=0, le=MAX_VERSION)]
Limit = Annotated[int, Query(ge=1, le=200)]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]


@router.get("/health")
async def health(who: Who, overview: Overview) -> Response:
    require_right(who, Right.WATCH)
    return json_answer(await overview.health())


@router.get("/runs/{run}/sessions")
async def sessions(
    run: str,
    who: Who,
    overview: Overview,
    state: SessionState | None = None,
    training: TrainingState | None = None,
    group: str | None = None,
    name: str | None = None,
    attributed_by: str | None = None,
    min_reward: Reward = None,
    max_reward: Reward = None,
    cursor: str | None = None,
    limit: Limit = 50,
) -> Response:
    """List a run's sessions, newest first.

    `group` is an id or a name, `name` the client's own name of a session. Reward bounds are inclusive and omit
    sessions without a reward.
    """
    wanted = SessionFilter(
        state=state,
        training=training,
        group=group,
        name=name,
        attributed_by=attributed_by,
        min_reward=min_reward,
        max_reward=max_reward,
    )
    run_id = await readable_run(run, who, overview)
    return json_answer(await overview.sessions(run_id, wanted, cursor=cursor, limit=limit))


@router.get("/runs/{run}/steps")
async def steps(run: str, who: Who, overview: Overview, cursor: str | None = None, limit: Limit = 50) -> Response:
    return json_answer(await overview.steps(await readable_run(run, who, overview), cursor=cursor, limit=limit))


@router.get("/runs/{run}/steps/{version}")
async def step(run: str, version: VersionNumber, who: Who, overview: Overview) -> Response:
    return json_answer(await overview.step(await readable_run(run, who, overview), version))


@router.get("/runs/{run}/steps/{version}/tokens")
async def step_tokens(run: str, version: VersionNumber, who: Who, overview: Overview) -> Response:
    return json_answer(await overview.step_tokens(await readable_run(run, who, overview), version))


@router.get("/runs/{run}/versions/diff")
async def version_diff(
    run: str,
    who: Who,
    overview: Overview,
    before: Annotated[int | None, Query(alias="from", ge=0, le=MAX_VERSION)] = None,
    after: Annotated[int | None, Query(alias="to", ge=0, le=MAX_VERSION)] = None,
    limit: Limit = 20,
) -> Response:
    """Explain what changed from one version to a later one; each list has at most `limit` entries."""
    run_id = await readable_run(run, who, overview)
    # Checked after the key: a key that may not know of the run gets 404, whatever else is wrong with its request.
    if before is None or after is None:
        raise InvalidRequest("give two versions: ?from=3&to=7", param="from" if before is None else "to")
    return json_answer(await overview.compare_versions(run_id, before, after, limit=limit))


@router.get("/runs/{run}/curves")
async def curves(run: str, who: Who, overview: Overview) -> Response:
    return json_answer(await overview.curves(await readable_run(run, who, overview)))


@router.get(
    "/runs/{run}/events",
    response_class=StreamingResponse,
    openapi_extra=described(answers={200: "Snapshots."}, media_type=EVENT_STREAM),
)
async def events(run: str, request: Request, who: Who, overview: Overview) -> StreamingResponse:
    """Stream server-sent events. The id of a `snapshot` is that of its last event; a client that reconnects with it
    in `Last-Event-ID` gets the events it missed. Comments keep a quiet stream open."""
    run_id = await readable_run(run, who, overview)
    return StreamingResponse(
        _snapshots(overview, run_id, last_event_id(request)), media_type=EVENT_STREAM, headers=_STREAM_HEADERS
    )


@router.get("/sessions/{session_id}")
async def session(session_id: str, who: Who, overview: Overview, tokens: bool = False) -> Response:
    require_right(who, Right.READ)
    found = await overview.session(session_id, with_tokens=tokens)
    if not covers(who, await overview.owner_of(found.session.run_id)):
        raise NotFound(f"there is no session {session_id!r}")
    return json_answer(found)


@router.get("/turns/{turn_id}")
async def turn(turn_id: str, who: Who, overview: Overview, tokens: bool = False) -> Response:
    require_right(who, Right.READ)
    found = await overview.turn(turn_id, with_tokens=tokens)
    if not covers(who, await overview.owner_of(found.run_id)):
        raise NotFound(f"there is no turn {turn_id!r}")
    return json_answer(found)


async def readable_run(run: str, who: Principal, overview: OverviewService) -> str:
    """Return the id of a run that the key may read. Raise NotFound or PermissionDenied."""
    return await permitted_run_id(run, who, overview, Right.READ)


async def permitted_run_id(run: str, who: Principal, overview: OverviewService, right: Right) -> str:
    """Return the id of a run in which the key has the right. Raise PermissionDenied without it, NotFound for a run
    that the key may not know of."""
    require_right(who, right)
    if who.run_id is None:
        row = await overview.owned_run(run)
        require_run(who, right, row, run)
        return str(row.id)
    # Found by the key and not by the path: a run whose name is the id of this one must not stand in its way.
    own = await overview.owner_of(who.run_id)
    if run not in (own.id, own.name):
        raise unknown_run(run)
    return str(own.id)


def last_event_id(request: Request) -> int | None:
    """Return the id of the last event that a reconnecting client received; None for a new client."""
    text = request.headers.get("last-event-id", "")
    return int(text) if text.isdecimal() and len(text) < 19 else None


def server_sent(event: str, data: str, *, event_id: int | None = None) -> bytes:
    """Encode a server-sent event; the format requires one `data` field per line of `data`."""
    lines = [f"event: {event}"]
    if event_id is not None:
        lines.append(f"id: {event_id}")
    lines.extend(f"data: {line}" for line in data.split("\n"))
    return ("\n".join(lines) + "\n\n").encode()


async def _snapshots(overview: OverviewService, run_id: str, after: int | None) -> AsyncIterator[bytes]:
    async for snapshot in overview.snapshots(run_id, after=after):
        if snapshot is None:
            yield b": still here\n\n"
        else:
            yield server_sent("snapshot", msgspec.json.encode(snapshot).decode(), event_id=snapshot.last_event_id)


def json_answer(answer: Any, *, status: int = 200) -> Response:
    """Return a view as a JSON response that no cache stores."""
    return Response(
        msgspec.json.encode(answer),
        status_code=status,
        media_type="application/json",
        headers={"cache-control": "no-store"},
    )
