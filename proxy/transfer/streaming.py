"""Session records as the bytes of a file, with a few sessions in memory at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from enum import StrEnum

from proxy.transfer.parquet import RecordWriter
from proxy.transfer.records import SessionRecord, encode

# Bounds of a Parquet row group, which is in memory until it is written.
_GROUP_TOKENS = 1 << 20
_GROUP_SESSIONS = 512


class ExportFormat(StrEnum):
    """The format of a file of sessions."""

    JSONL = "jsonl"
    PARQUET = "parquet"


async def encoded(records: AsyncIterator[SessionRecord], format_: ExportFormat) -> AsyncIterator[bytes]:
    """Return the pieces of a file with these records. Raise ParquetNotInstalled, before any is read."""
    if format_ is ExportFormat.JSONL:
        return _lines(records)
    chunks = _Chunks()
    writer = await asyncio.to_thread(RecordWriter, chunks)
    return _rows(records, writer, chunks)


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
