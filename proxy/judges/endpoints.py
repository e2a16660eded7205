"""Judges over HTTP.

GET  /api/v1/runs/{run}/judges                    {"judges": [JudgeView…]}
POST /api/v1/runs/{run}/judges/{judge}/rejudge    {"sessions"?} → 202 Rejudging
GET  /api/v1/runs/{run}/judges/{judge}/agreement  ?source= → Agreement
POST /api/v1/runs/{run}/judges/{judge}/try        {"sessions"} → Trial
GET  /api/v1/runs/{run}/judges/{judge}/secret     {"secret"}
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from proxy.auth.access import Right
from proxy.errors import InvalidRequest
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.judges.directory import MOST_SESSIONS, JudgeDirectory
from proxy.judges.trials import MOST_TRIED, JudgeTrials
from proxy.runs.http import trainers_run

router = APIRouter(prefix="/api/v1/runs/{run}/judges", tags=["judges"], route_class=StrictRoute)


SessionId = Annotated[str, Field(min_length=1, max_length=40)]


class TryBody(BaseModel):
    """The ids of the sessions to try a judge on."""

    model_config = ConfigDict(extra="forbid")

    sessions: Annotated[list[SessionId], Field(min_length=1, max_length=MOST_TRIED)]


class RejudgeBody(BaseModel):
    """The sessions to judge, by their ids; without them, all that the judge has not scored in its present form."""

    model_config = ConfigDict(extra="forbid")

    sessions: Annotated[list[SessionId], Field(min_length=1, max_length=MOST_SESSIONS)] | None = None


@router.get("")
async def judges(request: Request, run: str) -> JSONResponse:
    """List the run's judges with what they have scored and used."""
    found = await trainers_run(request, run, Right.READ)
    views = await service(request, JudgeDirectory).list_(found)
    return JSONResponse({"judges": msgspec.to_builtins(views)})


@router.post(
    "/{judge}/rejudge",
    status_code=202,
    openapi_extra=described(RejudgeBody, answers={202: "How many sessions will be judged."}),
)
async def rejudge(request: Request, run: str, judge: str) -> JSONResponse:
    """Judge ended sessions that the judge has not scored in its present form."""
    found = await trainers_run(request, run, Right.CHANGE)
    body = validated(RejudgeBody, await json_body(request))
    result = await service(request, JudgeDirectory).rejudge(found, judge, body.sessions)
    return JSONResponse(msgspec.to_builtins(result), 202)


@router.get("/{judge}/agreement")
async def agreement(
    request: Request,
    run: str,
    judge: str,
    source: Annotated[
        str | None, Query(min_length=1, max_length=128, description="The source of the people's rewards. Required.")
    ] = None,
) -> JSONResponse:
    """Show how far the judge's scores agree with people's rewards of the same sessions and turns."""
    found = await trainers_run(request, run, Right.READ)
    # Checked after the key: whoever may not know the run learns nothing about its endpoints either.
    if source is None:
        raise InvalidRequest("source is required: the source of the people's rewards, such as `api`", param="source")
    result = await service(request, JudgeDirectory).agreement(found, judge, source)
    return JSONResponse(msgspec.to_builtins(result))


@router.post("/{judge}/try", openapi_extra=described(TryBody, answers={200: "What the judge says."}))
async def try_(request: Request, run: str, judge: str) -> JSONResponse:
    """Show what the judge says about sessions, and record nothing. The answer waits for the judge's model."""
    found = await trainers_run(request, run, Right.CHANGE)
    body = validated(TryBody, await json_body(request))
    trial = await service(request, JudgeTrials).try_(found, judge, list(dict.fromkeys(body.sessions)))
    return JSONResponse(msgspec.to_builtins(trial))


@router.get("/{judge}/secret")
async def secret(request: Request, run: str, judge: str) -> JSONResponse:
    """Show the secret that signs a verifier's requests."""
    found = await trainers_run(request, run, Right.CHANGE)
    return JSONResponse({"secret": service(request, JudgeTrials).secret(found, judge)})
