"""Export and import over HTTP. An export streams, with a few sessions in memory at a time."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from proxy.auth.access import Right
from proxy.contract.policy import MAX_VERSION
from proxy.contract.states import SessionState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.errors import UnsupportedParameter
from proxy.http.body import json_body, validated
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.runs.http import trainers_run
from proxy.transfer.exporting import NAME_PATTERN, BackgroundExports
from proxy.transfer.parquet import ParquetNotInstalled
from proxy.transfer.preferences import PreferenceFilter, encode_preference
from proxy.transfer.reading import ExportFilter
from proxy.transfer.service import TransferService
from proxy.transfer.streaming import ExportFormat, encoded

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["transfer"], route_class=StrictRoute)

# Bound of `first_line`, which is only added to line numbers in error messages.
_MOST_LINES = 2**31 - 1

FirstLine = Annotated[int, Query(ge=1, le=_MOST_LINES)]

Number = Annotated[float | None, Query(allow_inf_nan=False)]


_MEDIA_TYPES = {
    ExportFormat.JSONL: "application/x-ndjson",
    ExportFormat.PARQUET: "application/vnd.apache.parquet",
}


class ExportBody(BaseModel):
    """An export in the background: its name, and which sessions it has, as in the query of `GET …/export`."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    format: ExportFormat = ExportFormat.JSONL
    since: Annotated[float, Field(allow_inf_nan=False)] | None = None
    until: Annotated[float, Field(allow_inf_nan=False)] | None = None
    version: Annotated[int, Field(ge=0, le=MAX_VERSION)] | None = None
    min_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    purpose: Purpose | None = None
    state: SessionState | None = None
    training: TrainingState | None = None
    task: Annotated[str, Field(max_length=512)] | None = None
    sessions: Annotated[list[Annotated[str, Field(max_length=40)]], Field(max_length=1000)] | None = None


def transfer_of(request: Request) -> TransferService:
    return service(request, TransferService)


@router.get("/export")
async def export(
    request: Request,
    run: str,
    format: ExportFormat = ExportFormat.JSONL,  # noqa: A002  (the name of the query parameter)
    since: Number = None,
    until: Number = None,
    version: Annotated[int | None, Query(ge=0, le=MAX_VERSION)] = None,
    min_reward: Number = None,
    purpose: Purpose | None = None,
    state: SessionState | None = None,
    training: TrainingState | None = None,
    task: str | None = None,
    session: Annotated[list[str] | None, Query(max_length=1000)] = None,
) -> Response:
    """Export a run's sessions with everything recorded of them, oldest first; erased ones are omitted. For keys
    with the right `READ_TRAINING`.

    `since` and `until` (exclusive) bound the start of a session, in seconds since the epoch. `version` selects
    sessions with a token of that version; `min_reward` omits sessions without a reward too. `session`, an id, may be
    given several times.
    """
    of_run = await trainers_run(request, run, Right.READ_TRAINING)
    wanted = ExportFilter(
        since=since,
        until=until,
        version=version,
        min_reward=min_reward,
        purpose=purpose,
        state=state,
        training=training,
        task=task,
        sessions=tuple(session) if session is not None else None,
    )
    records = transfer_of(request).export(of_run, wanted)
    try:
        pieces = await encoded(records, format)
    except ParquetNotInstalled as error:
        raise UnsupportedParameter(f"the proxy cannot write Parquet: {error}", param="format") from error
    return StreamingResponse(pieces, media_type=_MEDIA_TYPES[format])


@router.post(
    "/exports",
    status_code=202,
    openapi_extra=described(ExportBody, answers={202: "The export, which a background job writes."}),
)
async def begin_export(request: Request, run: str) -> JSONResponse:
    """Let a background job write sessions to the directory or the object store for exports. For keys with the right
    `READ_TRAINING`."""
    of_run = await trainers_run(request, run, Right.READ_TRAINING)
    body = validated(ExportBody, await json_body(request))
    wanted = ExportFilter(
        **body.model_dump(exclude={"name", "format", "sessions"}),
        sessions=tuple(body.sessions) if body.sessions is not None else None,
    )
    view = await service(request, BackgroundExports).begin(of_run, body.name, body.format, wanted)
    return JSONResponse(msgspec.to_builtins(view), 202)


@router.get("/exports/{name}")
async def show_export(request: Request, run: str, name: str) -> JSONResponse:
    """Return the state of an export in the background and, once it is done, its address."""
    of_run = await trainers_run(request, run, Right.READ_TRAINING)
    return JSONResponse(msgspec.to_builtins(await service(request, BackgroundExports).show(of_run, name)))


@router.get("/export/preferences")
async def export_preferences(
    request: Request, run: str, since: Number = None, until: Number = None, source: str | None = None
) -> Response:
    """Export a run's preferences as JSON lines, in order of arrival, each with the token ids of both sides; those
    about an erased session are omitted. For keys with the right `READ_TRAINING`."""
    of_run = await trainers_run(request, run, Right.READ_TRAINING)
    wanted = PreferenceFilter(since=since, until=until, source=source)
    records = transfer_of(request).export_preferences(of_run, wanted)
    return StreamingResponse(
        (encode_preference(record) async for record in records), media_type="application/x-ndjson"
    )


_REPORT = {200: "How many sessions were imported, and how many already existed."}


@router.post("/import", openapi_extra=described(answers=_REPORT))
async def import_sessions(
    request: Request,
    run: str,
    train: bool = False,
    keep_ids: bool = False,
    first_line: FirstLine = 1,
) -> JSONResponse:
    """Import sessions from JSON lines in the format of the export. Sessions imported before are skipped, so repeating
    a request adds nothing. With `train`, those from which a trainer can learn are trained; without, none is."""
    of_run = await trainers_run(request, run, Right.CHANGE)
    report = await transfer_of(request).add(
        of_run, await request.body(), first_line=first_line, train=train, keep_ids=keep_ids
    )
    return JSONResponse(msgspec.to_builtins(report))


@router.post(
    "/import/preferences",
    openapi_extra=described(answers={200: "How many preferences were imported, and how many already existed."}),
)
async def import_preferences(request: Request, run: str, first_line: FirstLine = 1) -> JSONResponse:
    """Import preferences from JSON lines in the format of their export. Their sessions must exist in the run or have
    been imported into it. Preferences imported before are skipped."""
    of_run = await trainers_run(request, run, Right.CHANGE)
    report = await transfer_of(request).add_preferences(of_run, await request.body(), first_line=first_line)
    return JSONResponse(msgspec.to_builtins(report))
