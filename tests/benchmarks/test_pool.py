"""Check the parts of the pool's benchmarks that could make their figures wrong: streams, relays, labels."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.pool.adapters import gaps_between
from benchmarks.pool.relay import BLOCK, Notes, Relay
from benchmarks.pool.streams import Streamed, stream_chat


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(text: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"id": "turn_1", "choices": [{"delta": {"content": text}, "finish_reason": finish}]}


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = event(delta("Yes")) + event(delta(".")) + event(delta(None, "stop")) + b"data: [DONE]\n\n"
FAILURE = event(delta("Yes")) + event({"error": {"message": "the engine is gone"}}) + b"data: [DONE]\n\n"


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[int]:
    """Run a server that answers every connection with these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def streamed(*pieces: bytes) -> Streamed:
    async with answering(*pieces) as port:
        return await stream_chat(port, "key", [{"role": "user", "content": "?"}])


@pytest.mark.parametrize("size", [7, 40, 10_000])
async def test_a_stream_is_read_however_it_is_divided(size: int) -> None:
    chunks = [chunk(WHOLE[at : at + size]) for at in range(0, len(WHOLE), size)]
    answer = await streamed(HEAD, *chunks, chunk(b""))
    assert (answer.text, answer.turn_id, answer.finish_reason) == ("Yes.", "turn_1", "stop")
    assert answer.succeeded
    assert len(answer.times) == 2


@pytest.mark.parametrize(
    ("pieces", "is_whole", "says"),
    [
        ((HEAD, chunk(FAILURE), chunk(b"")), True, "the engine is gone"),
        ((HEAD, chunk(event(delta("Yes")))), False, ""),
        ((HEAD, chunk(event(delta("Yes"))), chunk(b"")), False, None),
        ((b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno",), False, "no"),
        ((), False, "IncompleteReadError"),
    ],
)
async def test_an_answer_that_is_not_whole_has_not_succeeded(
    pieces: Sequence[bytes], is_whole: bool, says: str | None
) -> None:
    answer = await streamed(*pieces)
    assert not answer.succeeded
    assert answer.is_whole == is_whole
    assert says is None or (answer.error is not None and says in answer.error)


async def through_relay(relay_port: int, turn_id: str, ids: list[int]) -> bytes:
    body = json.dumps({"rid": f"{turn_id}/", "input_ids": ids}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay_port)
    writer.write(b"POST /generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_relay_counts_the_prefixes_that_the_engine_has_seen_since_its_start() -> None:
    notes = Notes()
    first, second = list(range(4 * BLOCK)), [*range(2 * BLOCK), *range(100, 100 + 2 * BLOCK)]
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}") as port:
        relay = Relay("one", port, notes)
        server, relay_port = await relay.serve()
        async with server:
            reused = []
            for number, ids in enumerate((first, second, first)):
                notes.start_again()
                assert (await through_relay(relay_port, f"turn_{number}", ids)).endswith(b"{}")
                reused.append(notes.reused_tokens)
            relay.clear()
            notes.start_again()
            await through_relay(relay_port, "turn_3", first)
            assert (notes.reused_tokens, notes.prompt_tokens, notes.reuse) == (0, 4 * BLOCK, 0.0)
    assert reused == [0, 2 * BLOCK, 4 * BLOCK]
    assert [visit.turn_id for visit in notes.visits] == ["turn_0", "turn_1", "turn_2", "turn_3"]
    assert all(visit.lost_at is not None for visit in notes.visits), "every connection was closed"


def test_gaps_are_those_between_two_times() -> None:
    answers = [(0.0, Streamed(times=[1.0, 2.0, 4.0, 8.0])), (0.0, Streamed(times=[3.0]))]
    assert gaps_between(answers, 0.0, 10.0) == [1.0, 2.0, 4.0]
    assert gaps_between(answers, 1.5, 8.0) == [2.0]
