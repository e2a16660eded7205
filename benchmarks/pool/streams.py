"""Streamed chat completions over raw sockets, with the time of every event."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.pool.installation import HOST

_SILENCE_S = 120.0
"""Longest wait for the next bytes of an answer. A call that hangs is a failure, and must not hang the benchmark."""


@dataclass
class Streamed:
    """One streamed answer. `times` has the arrival of each event with text, in seconds of `time.perf_counter`."""

    status: int = 0
    turn_id: str = ""
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    """The message of the error event, of an answer that is no stream, or of the lost connection."""
    has_error_event: bool = False
    is_whole: bool = False
    """Whether the stream ended with its end mark."""
    fingerprint: str | None = None
    times: list[float] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        return self.status == 200 and self.is_whole and self.error is None and self.finish_reason is not None

    def gaps(self) -> list[float]:
        """Return the seconds between neighbouring events."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


async def stream_chat(
    port: int, key: str, messages: Sequence[dict[str, Any]], *, session: str | None = None, **options: Any
) -> Streamed:
    """Send one call and read its stream to the end. Nothing is raised: the result has the error."""
    body = json.dumps({"messages": list(messages), "stream": True, **options}).encode()
    named = f"x-base-rl-session: {session}\r\n" if session is not None else ""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer {key}\r\n{named}"
        f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    answer = Streamed()
    writer = None
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(head.encode() + body)
        await _read(reader, answer)
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        answer.error = answer.error or f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    return answer


async def _read(reader: asyncio.StreamReader, answer: Streamed) -> None:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _SILENCE_S)
    answer.status = int(head.split(b" ", 2)[1])
    if b"text/event-stream" not in head.lower():
        answer.error = (await asyncio.wait_for(reader.read(), _SILENCE_S)).decode(errors="replace")[:500]
        return
    rest = b""
    while not answer.is_whole:
        size = int(await asyncio.wait_for(reader.readline(), _SILENCE_S), 16)  # chunked transfer encoding
        part = await asyncio.wait_for(reader.readexactly(size + 2), _SILENCE_S)
        if size == 0:
            return
        *events, rest = (rest + part[:-2]).split(b"\n\n")
        for event in events:
            _take(event, answer)


def _take(event: bytes, answer: Streamed) -> None:
    data = event.removeprefix(b"data: ")
    if data == b"[DONE]":
        answer.is_whole = True
        return
    if data == event:  # a comment, which keeps the connection alive
        return
    value = json.loads(data)
    if "error" in value:
        answer.error, answer.has_error_event = str(value["error"]["message"]), True
        return
    answer.turn_id = value["id"]
    answer.fingerprint = value.get("system_fingerprint") or answer.fingerprint
    for choice in value["choices"]:
        text = choice["delta"].get("content")
        if text:
            answer.text += text
            answer.times.append(time.perf_counter())
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
