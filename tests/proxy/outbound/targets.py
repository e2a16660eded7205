"""Targets on loopback that answer as a test says, well or badly."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LOOPBACK = "127.0.0.0/8"

Respond = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Received:
    """A request as it arrived."""

    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Target:
    """A server at `port`, and what it received."""

    port: int = 0
    requests: list[Received] = field(default_factory=list)


@asynccontextmanager
async def target(answer: bytes | Respond = OK, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Target]:
    """Serve on loopback. `answer` is sent as it is, or a function writes it."""
    served = Target()

    tasks: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await converse(reader, writer)
        finally:
            writer.close()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): text for name, text in (line.split(": ", 1) for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            served.requests.append(Received(head[0], headers, body))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        ended = [task for task in tasks if task is not None]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
