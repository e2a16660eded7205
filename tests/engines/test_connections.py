"""Kept connections to servers that do everything that HTTP/1.1 allows, and some things that it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from proxy.engines.connections import Connections
from proxy.errors import EngineTimeout, EngineUnavailable, InvalidEngineReply
from tests.engines.conftest import NOBODY
from tests.paces import at_some_pace

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """Requests received, head and body, in order; `connections` counts all connections, `open` those that are
    open."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.connections = 0
        self.open = 0
        self.closed = asyncio.Event()


Answer = Callable[[Server, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server_that(
    answer: Answer, *, limit: int = 8, silence: float = 30.0, prefix: str = "", user: str = ""
) -> AsyncIterator[tuple[Server, Connections]]:
    """Run a server that calls `answer` for each request; `answer` closes the writer if the server should close."""
    server = Server()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        server.open += 1
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
                server.requests.append((head, await reader.readexactly(size)))
                await answer(server, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            server.open -= 1
            writer.close()
            server.closed.set()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    connections = Connections(
        f"http://{user}127.0.0.1:{port}{prefix}", limit=limit, connect_seconds=5.0, silence_seconds=silence
    )
    async with listening:
        yield server, connections
        await connections.aclose()


def always(content: bytes, *, close: bool = False) -> Answer:
    async def answer(_server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        if close:
            writer.close()

    return answer


async def get(connections: Connections, path: str = "/") -> bytes:
    with await connections.request("GET", path) as reply:
        return await reply.read()


async def test_a_connection_is_used_again() -> None:
    async with server_that(always(OK)) as (server, connections):
        for body in (b"", b"one", b"two" * 100_000):
            with await connections.request("POST", "/x", body) as reply:
                assert (reply.status, await reply.read()) == (200, b"ok")
    assert server.connections == 1
    assert [body for _, body in server.requests] == [b"", b"one", b"two" * 100_000]


async def test_the_address_may_have_a_path_and_a_user() -> None:
    async with server_that(always(OK), prefix="/engines/1/", user="me:p%40ss@") as (server, connections):
        await get(connections, "/generate")
    head, _ = server.requests[0]
    assert head.startswith("GET /engines/1/generate HTTP/1.1\r\nhost: 127.0.0.1:")
    assert "authorization: Basic bWU6cEBzcw==\r\n" in head


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://localhost", "http://", "/generate"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Connections(url, limit=1, connect_seconds=1.0, silence_seconds=1.0)


@pytest.mark.parametrize(
    ("content", "body"),
    [
        (CHUNKED + b"2\r\nok\r\n3\r\nay!\r\n0\r\n\r\n", b"okay!"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK, b"ok"),
        (OK + OK, b"ok"),
    ],
)
async def test_every_way_to_end_a_body(content: bytes, body: bytes) -> None:
    async with server_that(always(content, close=True)) as (_, connections):
        assert await get(connections) == body
        assert await get(connections) == body


async def test_a_closed_idle_connection_fails_no_call() -> None:
    """The server has closed it, and the client learns that only with its next request."""

    async def answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) % 2:
            writer.write(OK)
            await writer.drain()
            return
        writer.transport.abort()

    async with server_that(answer) as (server, connections):
        for _ in range(3):
            assert await get(connections) == b"ok"
    assert server.connections == 3
    assert len(server.requests) == 5


async def test_an_idle_connection_that_ends_is_not_used() -> None:
    async def answer(server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        writer.close()

    async with server_that(answer) as (server, connections):
        assert await get(connections) == b"ok"
        await server.closed.wait()
        assert await get(connections) == b"ok"
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "content", [b"", b"HTTP/1.1 200 OK\r\n", CHUNKED + b"5\r\nok", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok"]
)
async def test_an_answer_that_is_cut_is_a_lost_connection(content: bytes) -> None:
    async with server_that(always(content, close=True)) as (_, connections):
        with pytest.raises(EngineUnavailable, match="lost"):
            await get(connections)


async def test_an_answer_that_is_not_http_is_a_lost_connection() -> None:
    async with server_that(always(b"* OK IMAP4 ready\r\n")) as (_, connections):
        with pytest.raises(EngineUnavailable, match="not HTTP"):
            await get(connections)


async def test_silence_is_measured_from_what_came_last() -> None:
    async def check(pause: float) -> None:
        async def answer(_server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED)
            for _ in range(6):
                await asyncio.sleep(pause)
                writer.write(b"2\r\nok\r\n")
                await writer.drain()

        heard: list[bytes] = []
        async with server_that(answer, silence=3 * pause) as (_, connections):
            with await connections.request("GET", "/") as reply:
                try:
                    while True:
                        heard.append(await reply.part())
                except EngineTimeout:
                    assert heard == [b"ok"] * 6

    await at_some_pace(check, 0.05, 0.5)


async def test_no_head_in_time_is_a_timeout() -> None:
    async with server_that(always(b""), silence=0.05) as (_, connections):
        with pytest.raises(EngineTimeout):
            await get(connections)


async def test_further_requests_wait_for_a_slot() -> None:
    going, most = asyncio.Event(), 0

    async def answer(server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most
        most = max(most, server.open)
        if server.open == 2:
            going.set()
        await going.wait()
        writer.write(OK)

    async with server_that(answer, limit=2) as (server, connections):
        assert await asyncio.gather(*(get(connections) for _ in range(10))) == [b"ok"] * 10
    assert (most, server.connections, len(server.requests)) == (2, 2, 10)


async def test_a_cancelled_request_gives_its_slot_back_and_closes_its_connection() -> None:
    asked = asyncio.Event()

    async def answer(server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        if len(server.requests) > 1:
            writer.write(OK)

    async with server_that(answer, limit=1) as (server, connections):
        task = asyncio.create_task(get(connections))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.closed.wait()
        assert await get(connections) == b"ok"


async def test_a_body_left_unread_costs_the_connection_and_one_that_runs_out_does_not() -> None:
    end = asyncio.Event()

    async def answer(_server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"4\r\ndone\r\n")
        await writer.drain()
        await end.wait()
        writer.write(b"0\r\n\r\n")

    async with server_that(answer) as (server, connections):
        with await connections.request("GET", "/") as reply:
            assert await reply.part() == b"done"
        end.set()
        await server.closed.wait()
        for _ in range(3):
            end.clear()
            with await connections.request("GET", "/") as reply:
                assert await reply.part() == b"done"
                reply.runs_out = True
            end.set()
            while not connections.idle:
                await asyncio.sleep(0)
    assert server.connections == 2


async def test_a_reader_that_is_slow_holds_the_server_back() -> None:
    written = 0
    block = b"x" * (1 << 20)

    async def answer(_server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 * len(block)))
        for _ in range(64):
            writer.write(block)
            await writer.drain()
            written += 1

    async with server_that(answer) as (_, connections):
        with await connections.request("GET", "/") as reply:
            await asyncio.sleep(0.2)
            assert written < 32
            assert len(await reply.read(64 * len(block))) == 64 * len(block)


async def test_a_body_beyond_its_limit_is_refused() -> None:
    async def answer(_server: Server, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b"x" * 1000)
        await writer.drain()

    async with server_that(answer) as (_, connections):
        for limit in (999, 1000):
            with await connections.request("GET", "/") as reply:
                if limit < 1000:
                    with pytest.raises(InvalidEngineReply, match="999 bytes"):
                        await reply.read(limit)
                else:
                    assert len(await reply.read(limit)) == 1000


async def test_an_unreachable_engine_is_unavailable() -> None:
    connections = Connections(NOBODY, limit=1, connect_seconds=1.0, silence_seconds=1.0)
    for _ in range(2):  # the slot is released
        with pytest.raises(EngineUnavailable, match="cannot be reached"):
            await get(connections)
    await connections.aclose()
