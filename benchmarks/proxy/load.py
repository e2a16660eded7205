"""The load generator: HTTP/1.1 over raw asyncio sockets, cheap enough to share two cores with the measured system.

A call costs it some tens of microseconds. It checks that every answer is a complete 200, and measures the time until
the answer is complete and, for a stream, until its first text.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

FIRST_TEXT = re.compile(rb'"(?:content|text)": ?"[^"]|"output_ids": ?\[\d')
"""The first piece of an answer with text or tokens. A delta with only a role does not count."""


class Failed(Exception):
    """A call was not answered with a complete 200."""


class Taken(NamedTuple):
    """Seconds of one call; `first` is for streams."""

    whole: float
    first: float | None


class Connection(asyncio.Protocol):
    """One persistent connection with one call at a time."""

    def __init__(self) -> None:
        self.body = b""
        self.is_closed = False
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[float] | None = None
        self._received = bytearray()
        self._body_at = -1
        self._length: int | None = None
        self._look_for_first = False
        self._first: float | None = None

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # of uvloop, which has it by shape alone

    async def call(self, request: bytes, *, stream: bool) -> Taken:
        """Send a request and read its answer. Raises Failed."""
        self._received.clear()
        self._body_at, self._length, self._first, self._look_for_first = -1, None, None, stream
        self._waiter = asyncio.get_running_loop().create_future()
        begun = time.perf_counter()
        self._transport.write(request)
        ended = await self._waiter
        if stream and self._first is None:
            raise Failed("the stream had no text")
        return Taken(ended - begun, None if self._first is None else self._first - begun)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if self._body_at < 0 and not self._read_head():
            return
        if self._look_for_first and FIRST_TEXT.search(received, self._body_at):
            self._first, self._look_for_first = time.perf_counter(), False
        if self._length is None:
            whole = received.endswith(b"\r\n0\r\n\r\n")
        else:
            whole = len(received) >= self._body_at + self._length
        if whole and self._waiter is not None and not self._waiter.done():
            self.body = bytes(received[self._body_at :])
            self._waiter.set_result(time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(Failed(f"the connection was lost: {exc}"))

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._received[:end]).lower()
        self._body_at = end + 4
        if not head.startswith(b"http/1.1 200 "):
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(Failed(bytes(self._received[:600]).decode(errors="replace")))
            return False
        at = head.find(b"content-length:")
        if at >= 0:
            self._length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        return True


Requests = Iterator[bytes]
"""The endless requests of one client."""


class Load(NamedTuple):
    """The result of a load: seconds of every call, and seconds from its begin to its end."""

    calls: list[Taken]
    seconds: float


async def closed(port: int, clients: list[Requests], *, calls: int, stream: bool = False) -> Load:
    """Let every client send one request after another until `calls` were answered in total."""
    taken: list[Taken] = []
    left = calls

    async def one(requests: Requests) -> None:
        nonlocal left
        connection = await Connection.open(port)
        try:
            while left > 0:
                left -= 1
                taken.append(await connection.call(next(requests), stream=stream))
        finally:
            connection.close()

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for requests in clients:
            group.create_task(one(requests))
    return Load(taken, time.perf_counter() - begun)


async def paced(port: int, client: Callable[[], Requests], *, rate: float, calls: int, seed: int) -> Load:
    """Send calls at random times, `rate` per second, whether or not earlier ones were answered.

    A call is timed from when it was due, so a system that falls behind cannot hide it.
    """
    chance = random.Random(seed)
    free: deque[tuple[Connection, Requests]] = deque()
    taken: list[Taken] = []

    async def one(due: float) -> None:
        connection, requests = free.pop() if free else (await Connection.open(port), client())
        late = time.perf_counter() - due
        spent = await connection.call(next(requests), stream=False)
        taken.append(Taken(late + spent.whole, None))
        free.append((connection, requests))

    begun = due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(calls):
            due += chance.expovariate(rate)
            if (ahead := due - time.perf_counter()) > 0:
                await asyncio.sleep(ahead)
            group.create_task(one(due))
    seconds = time.perf_counter() - begun
    for connection, _ in free:
        connection.close()
    return Load(taken, seconds)
