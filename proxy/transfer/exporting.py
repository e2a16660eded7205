"""Exports in the background: a job writes a run's sessions to a directory or an object store."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.object_store import ObjectStore
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, NotFound, UnsupportedParameter
from proxy.lifecycle.outbox import enqueue
from proxy.lifecycle.signals import Signals
from proxy.private_files import make_directory, open_file
from proxy.runs.service import RunDirectory, RunView
from proxy.settings import ConfigurationError
from proxy.transfer.parquet import ParquetNotInstalled, is_installed
from proxy.transfer.reading import ExportFilter
from proxy.transfer.repository import ExportRepository
from proxy.transfer.service import sessions_of
from proxy.transfer.streaming import ExportFormat, encoded

EXPORTING = "export"
"""The kind of job that writes an export."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

# Bytes that are written at once, on a thread: a line of JSON may be small.
_AT_ONCE = 1 << 20
# The job is tried again after that.
_STORE_PATIENCE_SECONDS = 60.0


class ExportView(msgspec.Struct, frozen=True, kw_only=True):
    """An export: its job with the job's state and last error and, once it is done, its file's address (a path, or
    s3://…), sessions and bytes."""

    name: str
    job: str
    state: str
    error: str | None = None
    address: str | None = None
    sessions: int | None = None
    bytes: int | None = None


class BackgroundExports:
    """Enqueues exports and writes them. `directory` is where they are written, or prepared for `store_url`."""

    def __init__(
        self,
        *,
        database: Database,
        runs: RunDirectory,
        signals: Signals,
        clock: Clock,
        directory: Path,
        store_url: str | None,
    ) -> None:
        """Raise ConfigurationError for an object store without the packages that it needs."""
        try:
            self._store = None if store_url is None else ObjectStore(store_url, _STORE_PATIENCE_SECONDS)
        except ImportError as error:
            raise ConfigurationError(f"server.exports_url: {error}") from error
        self._database = database
        self._runs = runs
        self._signals = signals
        self._clock = clock
        self._directory = directory

    async def begin(self, run: RunView, name: str, format_: ExportFormat, wanted: ExportFilter) -> ExportView:
        """Enqueue an export. Raise Conflict if the run has one of this name, and UnsupportedParameter for a format
        that this proxy cannot write."""
        if format_ is ExportFormat.PARQUET and not is_installed():
            raise UnsupportedParameter(f"the proxy cannot write Parquet: {ParquetNotInstalled()}", param="format")
        payload = {"name": name, "format": format_.value, "wanted": msgspec.to_builtins(wanted)}

        def write(connection: Connection) -> str | None:
            key = _key(run.id, name)
            return enqueue(connection, kind=EXPORTING, key=key, payload=payload, now=self._clock(), run_id=run.id)

        job_id = await self._database.commit(write)
        if job_id is None:
            raise Conflict(f"the run has an export {name!r} already: give another name", param="name")
        self._signals.jobs.notify()
        return await self.show(run, name)

    async def show(self, run: RunView, name: str) -> ExportView:
        """Return an export. Raise NotFound; exports are listed as long as their jobs."""
        row = await self._database.read(
            lambda connection: ExportRepository(connection).find(EXPORTING, _key(run.id, name))
        )
        if row is None:
            raise NotFound(f"the run {run.name!r} has no export {name!r}", param="name")
        return ExportView(name=name, job=row.id, state=row.state, error=row.error, **(row.result or {}))

    async def write(self, job_id: str, run_id: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Write the file of a job and return its result. Raise NotFound for a deleted run, OSError.

        The file gets its name when it is whole. An attempt that follows a kill begins again and writes the same name.
        """
        run = await self._runs.by_id(run_id)
        wanted = msgspec.convert(payload["wanted"], ExportFilter)
        format_ = ExportFormat(payload["format"])
        target = Path(run.id) / f"{payload['name']}.{format_.value}"
        folder = self._directory / run.id
        await asyncio.to_thread(_prepare, folder, job_id)
        # A part of its own for each attempt: a worker that lost its lease may still write.
        part = folder / f".{job_id}-{secrets.token_hex(4)}.part"
        try:
            sessions = _Counted(sessions_of(self._database, run, wanted))
            size = await _write(part, await encoded(sessions, format_))
            address = await asyncio.to_thread(self._publish, part, target)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
        return {"address": address, "sessions": sessions.count, "bytes": size}

    def _publish(self, part: Path, target: Path) -> str:
        if self._store is None:
            return str(part.replace(self._directory / target))
        self._store.upload(part, target.as_posix())
        return f"{self._store.url}/{target.as_posix()}"


class _Counted:
    """Counts the records that pass."""

    def __init__(self, records: AsyncIterator[Any]) -> None:
        self._records = records
        self.count = 0

    def __aiter__(self) -> _Counted:
        return self

    async def __anext__(self) -> Any:
        record = await anext(self._records)
        self.count += 1
        return record


def _key(run_id: str, name: str) -> str:
    return f"{run_id}:{name}"


def _prepare(folder: Path, job_id: str) -> None:
    """Make the run's folder, and remove what killed attempts of the job left there."""
    make_directory(folder)
    for part in folder.glob(f".{job_id}-*.part"):
        part.unlink(missing_ok=True)


async def _write(path: Path, pieces: AsyncIterator[bytes]) -> int:
    """Write the pieces to a file, on the disk before this returns. Return the number of bytes."""
    size, waiting = 0, bytearray()
    with open_file(path, "wb") as file:
        async for piece in pieces:
            waiting += piece
            size += len(piece)
            if len(waiting) >= _AT_ONCE:
                await asyncio.to_thread(file.write, bytes(waiting))
                waiting.clear()
        await asyncio.to_thread(file.write, bytes(waiting))
        await asyncio.to_thread(file.flush)
        await asyncio.to_thread(partial(os.fsync, file.fileno()))
    return size
