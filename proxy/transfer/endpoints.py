"""Export and import over HTTP. An export streams, with a few sessions in memory at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from proxy.auth.access import Right
from proxy.contract.policy import MAX_VERSION
from proxy.contract.states import SessionState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.errors import UnsupportedParameter
from proxy.http.openapi import described
from proxy.http.services import service
from proxy.http.strict_route import StrictRoute
from proxy.runs.http import trainers_run
from proxy.transfer.parquet import ParquetNotInstalled, RecordWriter
from proxy.transfer.preferences import PreferenceFilter, encode_preference
from proxy.transfer.reading import ExportFilter
from proxy.transfer.records import SessionRecord, encode
from proxy.transfer.service import TransferService

router = APIRouter(prefix="/api/v1/runs/{run}", tags=["transfer"], route_class=StrictRoute)

# Bounds of a Parquet row group, which is in memory until it is written.
_GROUP_TOKENS = 1 << 20
_GROUP_SESSIONS = 512
# Bound of `first_line`, which is only added to line numbers in error messages.
_MOST_LINES = 2**31 - 1

FirstLine = Annotated[int, Query(ge=1, le=_MOST_LINES)]

Number = Annotated[float | None, Query(allow_inf_nan=False)]


class ExportFormat(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"


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
    if format is ExportFormat.JSONL:
        return StreamingResponse(_lines(records), media_type="application/x-ndjson")
    chunks = _Chunks()
    try:
        writer = await asyncio.to_thread(RecordWriter, chunks)
    except ParquetNotInstalled as error:
        raise UnsupportedParameter(f"the proxy cannot write Parquet: {error}", param="format") from error
    return StreamingResponse(_rows(records, writer, chunks), media_type="application/vnd.apache.parquet")


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


async def _lines(records: AsyncIterator[SessionRecord]) -> AsyncIterator[bytes]:
    async for record in records:
        yield encode(record)


async def _rows(records: AsyncIterator[SessionRecord], writer: RecordWriter, chunks: _Chunks) -> AsyncIterator[bytes]:
    group: list[SessionRecord] = []
    tokens = 0
    async for record in records:
        group.append(record)
        tokens += sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in record.turns)
        if tokens >= _GROUP_TOKENS or len(group) >= _GROUP_SESSIONS:
            # On a thread: compressing a group would block the event loop.
            await asyncio.to_thread(writer.write, group)
            yield chunks.take()
            group, tokens = [], 0
    if group:
        await asyncio.to_thread(writer.write, group)
    await asyncio.to_thread(writer.close)
    yield chunks.take()


class _Chunks:
    """A write-only file for the Parquet writer, whose bytes are taken out as they are written."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._size += len(part)
        return len(part)

    def take(self) -> bytes:
        taken, self._parts = b"".join(self._parts), []
        return taken

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: written bytes can be taken at once."""

    def close(self) -> None:
        """Do nothing: bytes can be taken after the writer closed the file."""

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False
