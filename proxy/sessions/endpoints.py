"""Sessions over HTTP: open, read, end."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from proxy.auth.access import Principal, Right, require_right
from proxy.auth.http import principal
from proxy.contract.states import Outcome
from proxy.contract.trajectory import Purpose
from proxy.errors import InvalidRequest, PermissionDenied
from proxy.http.address import client_address
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.runs.http import permitted_run
from proxy.runs.service import RunDirectory, RunView
from proxy.sessions.identification import checked_name
from proxy.sessions.opening import SessionSpec
from proxy.sessions.service import CreatedSession, SessionService

router = APIRouter(tags=["sessions"])

# One transaction opens them all, and others wait for it meanwhile.
_MOST_SESSIONS = 1024
_LONGEST_TTL = 30 * 86400.0
_METADATA_BYTES = 65536
_SESSION = described(answers={200: "The session."})


def _plain_metadata(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None and len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode()) > _METADATA_BYTES:
        raise ValueError(f"at most {_METADATA_BYTES} bytes as JSON")
    return value


class CreateSessionBody(BaseModel):
    """The session to open. `n` opens that many sessions of one group, for algorithms that compare the attempts of a
    group. `run`, a name or an id, is required with the key of a project."""

    model_config = ConfigDict(extra="forbid")

    task: Annotated[StrictStr, Field(max_length=16384)] | None = None
    group: Annotated[StrictStr, Field(min_length=1, max_length=200)] | None = None
    group_size: Annotated[StrictInt, Field(ge=1, le=_MOST_SESSIONS)] | None = None
    purpose: Purpose = Purpose.TRAIN
    metadata: Annotated[dict[str, Any] | None, AfterValidator(_plain_metadata)] = None
    ttl: Annotated[StrictInt | StrictFloat, Field(gt=0, le=_LONGEST_TTL, allow_inf_nan=False)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=_MOST_SESSIONS)] | None = None
    run: Annotated[StrictStr, Field(min_length=1, max_length=64)] | None = None


class EndSessionBody(BaseModel):
    """The result of the attempt. `failed` and `cancelled` sessions are trained only if they are rewarded."""

    model_config = ConfigDict(extra="forbid")

    outcome: Outcome = Outcome.COMPLETED


def sessions_of(request: Request) -> SessionService:
    return service(request, SessionService)


@router.post(
    "/v1/sessions",
    status_code=201,
    openapi_extra=described(CreateSessionBody, answers={201: "The session, or all of them."}, may_be_absent=True),
)
async def create_sessions(request: Request) -> JSONResponse:
    """Open a session, or `n` of one group, each with a key of its own. The keys are shown only in this answer."""
    who = await principal(request)
    require_right(who, Right.CALL)
    if who.session_id is not None:
        raise PermissionDenied("a session key is for its own session: open sessions with the key of the run")
    body = validated(CreateSessionBody, await _object(request))
    _check_group(body)
    run = await _run_for(request, who, body.run)
    run.refuse_archived()
    spec = SessionSpec(
        task=body.task,
        group=body.group,
        group_size=body.group_size,
        purpose=body.purpose,
        metadata=body.metadata,
        ttl=body.ttl,
    )
    created = await sessions_of(request).create(run, spec, body.n, limited_as=who.limited_as)
    base_url = f"{client_address(request)}/v1"
    answers = [_created(session, base_url) for session in created]
    return JSONResponse({"sessions": answers} if (body.n or 1) > 1 else answers[0], 201)


@router.get("/v1/sessions/{session_id}", openapi_extra=_SESSION)
async def get_session(request: Request, session_id: str) -> JSONResponse:
    """Return the state, turns and rewards of a session, and whether it is trained or why not."""
    view = await sessions_of(request).get(await principal(request), session_id)
    return JSONResponse(msgspec.to_builtins(view))


@router.post(
    "/v1/sessions/{session_id}/end",
    openapi_extra=described(EndSessionBody, answers={200: "The session."}, may_be_absent=True),
)
async def end_session(request: Request, session_id: str) -> JSONResponse:
    """End a session. Ending it again is no error."""
    who = await principal(request)
    body = validated(EndSessionBody, await _object(request))
    view = await sessions_of(request).end(who, session_id, body.outcome)
    return JSONResponse(msgspec.to_builtins(view))


async def _object(request: Request) -> Any:
    """Return the body; an absent body has no fields."""
    body = await json_body(request)
    return {} if body is None else body


async def _run_for(request: Request, who: Principal, asked: str | None) -> RunView:
    """Return the run for a new session. Raise InvalidRequest if a project's key names none, NotFound."""
    name = asked or who.run_id
    if name is None:
        raise InvalidRequest("a key of a project needs the run for the session: give `run`", param="run")
    return await permitted_run(service(request, RunDirectory), who, Right.CALL, name)


def _check_group(body: CreateSessionBody) -> None:
    if body.group is not None:
        checked_name(body.group, param="group")
    if body.group_size is None:
        return
    if body.group is None and body.n is None:
        raise InvalidRequest("group_size needs a group's name, or n", param="group_size")
    if body.n is not None and body.n > body.group_size:
        raise InvalidRequest(f"n is {body.n}, more than the group's size of {body.group_size}", param="n")


def _created(session: CreatedSession, base_url: str) -> dict[str, str]:
    answer = {"id": str(session.id), "api_key": session.api_key, "base_url": base_url}
    if session.group_id is not None:
        answer["group_id"] = session.group_id
    return answer
