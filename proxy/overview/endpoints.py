"""The operating API under /api/v1: what runs, sessions, turns, rewards and steps look like, and their switches.

Answers are the views of `overview/views.py` as JSON, field by field; lists are `{"<things>": […], "next_cursor"}`,
where the cursor goes into `?cursor=` for the next page. An admin key may do everything; a run key may read its run.

    GET    /api/v1/health                          Health
    GET    /api/v1/runs                            {"runs": [RunSummary…]}; with a run key, its own
    GET    /api/v1/runs/{run}                      RunSummary; {run} is a name or an id
    DELETE /api/v1/runs/{run}                      204; of a run that nothing was recorded of
    POST   /api/v1/runs/{run}/pause, /resume       RunSummary as it is then; ?reason= of a pause is shown
    GET    /api/v1/runs/{run}/sessions             {"sessions": [SessionItem…], "next_cursor"}
    GET    /api/v1/rewards, /runs/{run}/rewards    see overview/rewards/endpoints.py
    GET    /api/v1/runs/{run}/steps                {"steps": [StepItem…], "next_cursor"}
    GET    /api/v1/runs/{run}/steps/{version}      StepView
    GET    /api/v1/runs/{run}/steps/{version}/tokens   StepTokens
    GET    /api/v1/runs/{run}/curves               Curves
    GET    /api/v1/runs/{run}/events               server-sent events: `snapshot`, Snapshot
    GET    /api/v1/sessions/{id}                   SessionView; ?tokens=1 adds ids and log-probabilities
    GET    /api/v1/turns/{id}                      TurnView; ?tokens=1 likewise

Keys are in `overview/key_endpoints.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse

from proxy.auth.http import principal, require
from proxy.auth.service import Principal, PrincipalKind
from proxy.contract.policy import MAX_VERSION
from proxy.contract.states import SessionState, TrainingState
from proxy.errors import NotFound, PermissionDenied
from proxy.http.openapi import EVENT_STREAM, described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.overview.filters import SessionFilter
from proxy.overview.service import OverviewService
from proxy.overview.views import RunList
from proxy.runs.served import ServedRun
from proxy.runs.service import RunDirectory

router = APIRouter(prefix="/api/v1", route_class=StrictRoute)

_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def overview_of(request: Request) -> OverviewService:
    return service(request, OverviewService)


Who = Annotated[Principal, Depends(principal)]
Overview = Annotated[OverviewService, Depends(overview_of)]
VersionNumber = Annotated[int, PathParameter(ge=0, le=MAX_VERSION)]
Limit = Annotated[int, Query(ge=1, le=200)]
Reason = Annotated[str | None, Query(min_length=1, max_length=2000)]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]


@router.get("/health")
async def health(who: Who, overview: Overview) -> Response:
    require(who, PrincipalKind.ADMIN)
    return json_answer(await overview.health())


@router.get("/runs")
async def runs(who: Who, overview: Overview) -> Response:
    require(who, PrincipalKind.ADMIN, PrincipalKind.RUN)
    if who.kind is PrincipalKind.RUN:
        return json_answer(RunList(runs=(await overview.run(str(who.run_id)),)))
    return json_answer(await overview.runs())


@router.get("/runs/{run}")
async def run(run: str, who: Who, overview: Overview) -> Response:
    return json_answer(await overview.run(await readable_run(run, who, overview)))


@router.delete("/runs/{run}", status_code=204)
async def delete_run(run: str, request: Request, who: Who) -> Response:
    """Only of a run that has no sessions, no claims and no steps, and is not served here; 409 otherwise."""
    require(who, PrincipalKind.ADMIN)
    await service(request, RunDirectory).delete(run, served=service(request, ServedRun).run.id)
    return Response(status_code=204)


@router.post("/runs/{run}/pause")
async def pause(run: str, who: Who, overview: Overview, reason: Reason = None) -> Response:
    """A trainer may pause its own run; going on is for an operator to say."""
    return json_answer(await overview.pause(await own_run(run, who, overview, PrincipalKind.TRAINER), reason=reason))


@router.post("/runs/{run}/resume")
async def resume(run: str, who: Who, overview: Overview) -> Response:
    require(who, PrincipalKind.ADMIN)
    return json_answer(await overview.resume(run))


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

    `group` is an id or a name, `name` the client's own name of a session. Reward bounds are inclusive and leave out
    the unrewarded.
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


@router.get("/runs/{run}/curves")
async def curves(run: str, who: Who, overview: Overview) -> Response:
    return json_answer(await overview.curves(await readable_run(run, who, overview)))


@router.get(
    "/runs/{run}/events",
    response_class=StreamingResponse,
    openapi_extra=described(answers={200: "Snapshots."}, media_type=EVENT_STREAM),
)
async def events(run: str, request: Request, who: Who, overview: Overview) -> StreamingResponse:
    """Server-sent events. Each `snapshot` has as its id the last event it tells of; with that in `Last-Event-ID`, a
    client that comes back gets what it missed. Comments keep quiet streams alive."""
    run_id = await readable_run(run, who, overview)
    return StreamingResponse(
        _snapshots(overview, run_id, last_event_id(request)), media_type=EVENT_STREAM, headers=_STREAM_HEADERS
    )


@router.get("/sessions/{session_id}")
async def session(session_id: str, who: Who, overview: Overview, tokens: bool = False) -> Response:
    require(who, PrincipalKind.ADMIN, PrincipalKind.RUN)
    found = await overview.session(session_id, with_tokens=tokens)
    if who.kind is PrincipalKind.RUN and found.session.run_id != who.run_id:
        raise NotFound(f"there is no session {session_id!r}")
    return json_answer(found)


@router.get("/turns/{turn_id}")
async def turn(turn_id: str, who: Who, overview: Overview, tokens: bool = False) -> Response:
    require(who, PrincipalKind.ADMIN, PrincipalKind.RUN)
    found = await overview.turn(turn_id, with_tokens=tokens)
    if who.kind is PrincipalKind.RUN and found.run_id != who.run_id:
        raise NotFound(f"there is no turn {turn_id!r}")
    return json_answer(found)


async def readable_run(run: str, who: Principal, overview: OverviewService) -> str:
    """The run's id. Raises NotFound, and PermissionDenied for another run's key."""
    return await own_run(run, who, overview, PrincipalKind.RUN)


async def own_run(run: str, who: Principal, overview: OverviewService, kind: PrincipalKind) -> str:
    """The id of a run for an admin's key or its own of this kind. Raises NotFound, PermissionDenied."""
    require(who, PrincipalKind.ADMIN, kind)
    if who.kind is PrincipalKind.ADMIN:
        return await overview.run_id(run)
    own = await overview.run(str(who.run_id))
    if run not in {own.id, own.name}:
        raise PermissionDenied("this key is for its own run only")
    return own.id


def last_event_id(request: Request) -> int | None:
    """Where a returning client of an event stream goes on; None for a new one."""
    text = request.headers.get("last-event-id", "")
    return int(text) if text.isdecimal() and len(text) < 19 else None


def server_sent(event: str, data: str, *, event_id: int | None = None) -> bytes:
    """One server-sent event. Every line of `data` gets its own field, as the format wants."""
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
    """A view as JSON, which nobody keeps."""
    return Response(
        msgspec.json.encode(answer),
        status_code=status,
        media_type="application/json",
        headers={"cache-control": "no-store"},
    )
