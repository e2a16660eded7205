"""Bounds on connections over real sockets: too many, too large, too slow, idle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from proxy.http.connections import BoundedConnection, Connections, connections_within

HEADER_KIB = 2
LONG = 30.0
"""Seconds. A bound that no test reaches, so it cannot be what ends a connection."""

SHORT = 0.2
MUCH = 32 << 20
MUCH_ASKED = b"GET /much HTTP/1.1\r\nhost: x\r\n\r\n"


PARTLY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\na"
"""A request without the rest of its body. The server answers 100 once the application waits for that rest."""


class Bounds(NamedTuple):
    max_connections: int = 100
    max_header_kib: int = HEADER_KIB
    max_headers: int = 20
    header_timeout_seconds: float = LONG
    body_timeout_seconds: float = LONG
    answer_timeout_seconds: float = LONG


class Refusals:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def connection_refused(self, *, reason: str) -> None:
        self.reasons.append(reason)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the size of the body.

    `/early` is answered before the body is read; `/much` gets an answer that exceeds the buffers of sockets.
    """
    size = 0
    while scope["path"] != "/early":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        if not message["more_body"]:
            break
    text = str(size).encode() if scope["path"] != "/much" else bytes(MUCH)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


@asynccontextmanager
async def serving(bounds: Bounds, refusals: Refusals | None = None) -> AsyncIterator[tuple[int, Connections]]:
    """A server with these bounds on a free port of loopback."""
    connections = Connections(bounds, refusals or Refusals(), most=bounds.max_connections)
    http = cast("type[BoundedConnection]", partial(BoundedConnection, connections=connections))
    config = uvicorn.Config(application, port=0, http=http, lifespan="off", log_config=None, server_header=False)
    server = uvicorn.Server(config)
    served = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        yield server.servers[0].sockets[0].getsockname()[1], connections
    finally:
        server.should_exit = server.force_exit = True
        await served


@asynccontextmanager
async def busy(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose request is being answered."""
    async with connected(port) as (reader, writer):
        writer.write(PARTLY)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).startswith(b"HTTP/1.1 100")
        yield reader, writer


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return everything that the server sends before it closes the connection.

    The connection may end with a reset, because the server has not read all our bytes.
    """
    received = b""
    async with asyncio.timeout(10):
        try:
            while part := await reader.read(65536):
                received += part
        except ConnectionResetError:
            pass
    return received


def refused(answer: bytes, status: int) -> dict[str, Any]:
    """Return the error of a refusal, after checking its envelope and its request id."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"x-request-id: req_" in head
    assert b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def whole(port: int) -> bytes:
    """Return the first line of the answer to an ordinary request."""
    async with connected(port) as (reader, writer):
        writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
        return await asyncio.wait_for(reader.readline(), 10)


HEADS = {
    "one long value": b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * (HEADER_KIB << 10),
    "a long name": b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a" * (HEADER_KIB << 10),
    "a long path": b"GET /" + b"a" * (HEADER_KIB << 10),
    "many": b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 21,
    "ended": b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * (HEADER_KIB << 10) + b"\r\n\r\n",
    # More than arrives at once: what comes with the end of a body in one piece is not counted.
    "trailers": b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nt: "
    + b"a" * (1 << 20),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=list(HEADS))
@pytest.mark.parametrize("pieces", [1, 7])
async def test_heads_above_the_bounds_are_refused(head: bytes, pieces: int) -> None:
    refusals = Refusals()
    async with serving(Bounds(), refusals) as (port, connections), connected(port) as (reader, writer):
        size = len(head) // pieces + 1
        with suppress(ConnectionError):  # it is closed while the last pieces are on their way
            for start in range(0, len(head), size):
                writer.write(head[start : start + size])
                await writer.drain()
        error = refused(await until_closed(reader), 431)
        assert (error["code"], "server.max_header_kib" in error["message"]) == ("headers_too_large", True)
        assert refusals.reasons == ["headers"]
        assert (await whole(port)).startswith(b"HTTP/1.1 200")
        await until(lambda: len(connections) == 0)


async def test_endless_headers_are_not_buffered() -> None:
    """Sending fails soon because the connection is closed, so the server has read at most a buffer or two."""
    async with serving(Bounds()) as (port, _), connected(port) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nlong: ")
        sent = 0
        with suppress(ConnectionResetError, BrokenPipeError):
            while sent < 1 << 28:
                writer.write(b"a" * (1 << 16))
                sent += 1 << 16
                await writer.drain()
        assert sent < 1 << 25


async def test_a_head_within_the_bounds_is_accepted_in_pieces_and_after_others() -> None:
    async with serving(Bounds()) as (port, _), connected(port) as (reader, writer):
        for _ in range(5):  # each is counted by itself
            value = b"a" * ((HEADER_KIB << 10) - 200)
            head = b"POST / HTTP/1.1\r\nhost: x\r\nlong: " + value + b"\r\ncontent-length: 100000\r\n\r\n"
            for start in range(0, len(head), 300):
                writer.write(head[start : start + 300])
                await writer.drain()
            writer.write(b"b" * 100_000)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n100000"), 10)
            assert answer.startswith(b"HTTP/1.1 200")


async def test_invalid_http_is_a_400_in_the_envelope() -> None:
    refusals = Refusals()
    with capture_logs() as logs:
        async with serving(Bounds(), refusals) as (port, _):
            for _ in range(3):
                async with connected(port) as (reader, writer):
                    writer.write(b"\x16\x03\x01\x02\x00 this is no HTTP\r\n\r\n")
                    assert refused(await until_closed(reader), 400)["code"] == "invalid_request"
    assert refusals.reasons == ["malformed"] * 3
    assert len([entry for entry in logs if entry["event"] == "connection refused"]) == 1


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nhos", b"\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HT"])
async def test_an_unfinished_head_times_out(sent: bytes) -> None:
    async with (
        serving(Bounds(header_timeout_seconds=SHORT)) as (port, connections),
        connected(port) as (reader, writer),
    ):
        writer.write(sent)
        answer = await until_closed(reader)
        if sent.strip():
            refused(answer[answer.index(b"HTTP/1.1 408") :], 408)
        assert len(connections) == 0


async def test_a_connection_without_a_request_is_closed_without_an_answer() -> None:
    async with serving(Bounds(header_timeout_seconds=SHORT)) as (port, connections):
        async with AsyncExitStack() as stack:
            for reader, _ in [await stack.enter_async_context(connected(port)) for _ in range(50)]:
                assert await until_closed(reader) == b""
        assert len(connections) == 0


async def test_a_slow_head_is_timed_as_a_whole() -> None:
    """The bound is for the whole head, so a client cannot extend it by sending single bytes in time."""
    async with serving(Bounds(header_timeout_seconds=0.5)) as (port, _), connected(port) as (reader, writer):

        async def drip() -> None:
            for byte in b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        refused(await until_closed(reader), 408)
        dripping.cancel()
        await asyncio.wait([dripping])


@pytest.mark.parametrize("framing", [b"content-length: 1000", b"transfer-encoding: chunked"])
async def test_an_unfinished_body_times_out(framing: bytes) -> None:
    async with serving(Bounds(body_timeout_seconds=SHORT)) as (port, _), connected(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n" + b"5\r\nabcde\r\n")
        error = refused(await until_closed(reader), 408)
        assert "server.body_timeout_seconds" in error["message"]


async def test_the_time_out_of_a_body_also_holds_after_its_request_was_answered() -> None:
    async with serving(Bounds(body_timeout_seconds=SHORT)) as (port, _), connected(port) as (reader, writer):
        writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nabc")
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 200")


async def test_a_client_that_reads_nothing_of_its_answer_is_disconnected() -> None:
    refusals = Refusals()
    bounds = Bounds(answer_timeout_seconds=SHORT)
    async with serving(bounds, refusals) as (port, connections), connected(port) as (_, writer):
        writer.write(MUCH_ASKED)
        await until(lambda: refusals.reasons == ["answer_time"] and not connections)


async def test_a_client_that_reads_slowly_gets_its_whole_answer() -> None:
    refusals = Refusals()
    bounds = Bounds(answer_timeout_seconds=3 * SHORT)  # less than the client takes
    async with serving(bounds, refusals) as (port, _), connected(port) as (reader, writer):
        writer.write(MUCH_ASKED)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(8):
            await asyncio.sleep(SHORT / 2)  # the client's own pace
            assert len(await reader.readexactly(MUCH // 8)) == MUCH // 8
        assert refusals.reasons == []


async def test_a_refused_client_that_does_not_read_is_disconnected() -> None:
    """The refusal comes in the middle of an answer, and the connection must not stay open until the client leaves."""
    bounds = Bounds(answer_timeout_seconds=SHORT)
    async with serving(bounds) as (port, connections), connected(port) as (_, writer):
        writer.write(MUCH_ASKED + b"no request\r\n\r\n")
        await until(lambda: not connections)


async def test_a_new_connection_replaces_an_idle_one_but_not_one_in_use() -> None:
    refusals = Refusals()
    async with serving(Bounds(max_connections=3), refusals) as (port, connections), AsyncExitStack() as stack:
        idle, _ = await stack.enter_async_context(connected(port))
        in_use = [await stack.enter_async_context(busy(port)) for _ in range(3)]
        assert await until_closed(idle) == b""
        assert len(connections) == 3
        late, _ = await stack.enter_async_context(connected(port))
        assert refused(await until_closed(late), 503)["code"] == "overloaded"
        for reader, writer in in_use:
            writer.write(b"bc")
            assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200")
        assert (await whole(port)).startswith(b"HTTP/1.1 200")
    assert refusals.reasons == ["idle", "connections", "idle"]


async def test_pipelined_requests_are_bounded() -> None:
    async with serving(Bounds(max_headers=10)) as (port, _), connected(port) as (reader, writer):
        waiting = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n"
        writer.write(waiting + b"abc" + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 10)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 11:  # a few are answered, in order
            answers += await asyncio.wait_for(reader.read(4096), 10)
        writer.write(waiting + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
        writer.write(b"abc")
        assert (await until_closed(reader)).count(b"HTTP/1.1") < 30


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@given(setting=st.integers(1, 100_000), descriptors=st.integers(1, 1 << 20))
def test_connections_leave_descriptors_for_the_engine_and_the_database(setting: int, descriptors: int) -> None:
    most = connections_within(setting, descriptors)
    assert 1 <= most <= setting
    assert most == 1 or most <= descriptors - min(512, descriptors // 4)
