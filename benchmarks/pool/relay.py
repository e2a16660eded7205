"""Relays between the proxy and its engines, which note the requests and what a perfect prefix cache would reuse."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.pool.installation import HOST

BLOCK = 16
"""Tokens of the smallest part of a prompt that a cache holds, as in engines with paged caches."""


@dataclass
class Visit:
    """One request at an engine. `lost_at` is the time at which its connection ended; None if it was used again."""

    turn_id: str
    engine: str
    began: float
    lost_at: float | None = None


@dataclass
class Notes:
    """Everything that the relays saw. `prompt_tokens` and `reused_tokens` are sums over all requests."""

    visits: list[Visit] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0

    @property
    def reuse(self) -> float:
        return self.reused_tokens / max(1, self.prompt_tokens)

    def start_again(self) -> None:
        """Count prompts from now on; the caches stay as they are."""
        self.prompt_tokens = self.reused_tokens = 0


class Relay:
    """Passes the bytes of every connection to the engine and back. `clear` empties the cache, as a death does."""

    def __init__(self, engine: str, engine_port: int, notes: Notes) -> None:
        self._engine = engine
        self._engine_port = engine_port
        self._notes = notes
        self._cache: set[int] = set()

    def clear(self) -> None:
        self._cache.clear()

    async def serve(self) -> tuple[asyncio.Server, int]:
        """Listen on a free port, and return the server with the port."""
        server = await asyncio.start_server(self._connected, HOST, 0)
        port: int = server.sockets[0].getsockname()[1]
        return server, port

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            engine_reader, engine_writer = await asyncio.open_connection(HOST, self._engine_port)
        except OSError:
            writer.close()
            return
        current: list[Visit] = []
        forth = asyncio.create_task(self._requests(reader, engine_writer, current))
        back = asyncio.create_task(self._answers(engine_reader, writer))
        try:
            await asyncio.wait((forth, back), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for visit in current:
                visit.lost_at = time.perf_counter()
            for task in (forth, back):
                task.cancel()
            await asyncio.wait((forth, back))
            for end in (writer, engine_writer):
                end.close()

    async def _requests(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, current: list[Visit]
    ) -> None:
        with suppress(OSError, EOFError, asyncio.CancelledError):
            while True:
                head = await source.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
                body = await source.readexactly(length)
                current.clear()
                if head.startswith(b"POST /generate"):
                    visit = self._noted(json.loads(body))
                    if visit is not None:
                        current.append(visit)
                target.write(head + body)
                await target.drain()

    async def _answers(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while piece := await source.read(1 << 16):
                target.write(piece)
                await target.drain()

    def _noted(self, body: dict[str, object]) -> Visit | None:
        """Note a generation; a score, which has no id of a turn, is not one."""
        turn_id = body.get("rid")
        if not isinstance(turn_id, str):
            return None
        ids = body["input_ids"]
        assert isinstance(ids, list)
        reused, prefix, is_cached = 0, hash(body.get("lora_path")), True
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            prefix = hash((prefix, *ids[end - BLOCK : end]))
            is_cached = is_cached and prefix in self._cache
            reused += BLOCK * is_cached
            self._cache.add(prefix)
        self._notes.prompt_tokens += len(ids)
        self._notes.reused_tokens += reused
        visit = Visit(turn_id.removesuffix("/"), self._engine, time.perf_counter())
        self._notes.visits.append(visit)
        return visit
