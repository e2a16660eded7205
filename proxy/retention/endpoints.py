"""Erasure over HTTP, for admin keys."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from proxy.auth.access import Right, require_right
from proxy.auth.http import principal
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.retention.erasing import EraseService, ErasureTarget

router = APIRouter(prefix="/api/v1", tags=["keeping"], route_class=StrictRoute)

_Name = Annotated[StrictStr, Field(min_length=1, max_length=2000)]
_REPORT = {200: "The erased sessions, and the versions that learnt from them."}


class EraseBody(BaseModel):
    """The sessions to erase: one `session` (by its id or the client's own name) or all of a `user`, within one `run`
    (a name or id) or every run. With `dry_run`, nothing is erased and the answer reports what would be."""

    model_config = ConfigDict(extra="forbid")

    session: _Name | None = None
    user: _Name | None = None
    run: _Name | None = None
    dry_run: StrictBool = False


def erasing_of(request: Request) -> EraseService:
    return service(request, EraseService)


@router.post("/erase", openapi_extra=described(EraseBody, answers=_REPORT))
async def erase(request: Request) -> JSONResponse:
    """Delete the content of sessions for good; that they existed and were trained stays recorded. Repeating the
    request is no error."""
    require_right(await principal(request), Right.ADMINISTRATE)
    body = validated(EraseBody, await json_body(request))
    target = ErasureTarget(session=body.session, user=body.user, run=body.run)
    return JSONResponse(msgspec.to_builtins(await erasing_of(request).erase(target, dry_run=body.dry_run)))


@router.delete("/sessions/{session_id}", openapi_extra=described(answers=_REPORT))
async def erase_session(request: Request, session_id: str) -> JSONResponse:
    """Erase one session by its id, like `POST /erase`."""
    require_right(await principal(request), Right.ADMINISTRATE)
    report = await erasing_of(request).erase(ErasureTarget(session=session_id))
    return JSONResponse(msgspec.to_builtins(report))
