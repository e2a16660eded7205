"""An HTTP server on loopback with SGLang's API, whose answers a test may falsify."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

Event = dict[str, Any] | bytes | float
"""One part of a stream: a chunk, bytes as they are, or seconds of silence."""

Lie = Callable[["Honest"], list[Event]]
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


class Honest:
    """The true answer to one request, two tokens at a time, which a lie changes."""

    def __init__(self, request: dict[str, Any], ids: list[int], label: str) -> None:
        self.ids = ids
        self.label = label
        self.prompt_tokens = len(request["input_ids"])
        self.max_new_tokens = request["sampling_params"]["max_new_tokens"]

    def chunk(self, start: int, end: int, *, finish: str | None = None, **changed: Any) -> dict[str, Any]:
        """Return the tokens `[start, end)`; `changed` replaces fields of the chunk or of its `meta_info`."""
        ids = self.ids[start:end]
        meta = {
            "completion_tokens": end,
            "prompt_tokens": self.prompt_tokens,
            "weight_version": self.label,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "finish_reason": None if finish is None else {"type": finish},
        }
        chunk: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
        for name, value in changed.items():
            (chunk if name in chunk else meta)[name] = value
        return chunk

    def whole(self, **changed: Any) -> list[Event]:
        """Return an honest chunk of two tokens, then the rest with the `changed` fields."""
        return [self.chunk(0, 2), self.chunk(2, len(self.ids), finish="stop", **changed)]

    def scored(self, *logprobs: Any) -> list[Any]:
        """Return the log-probabilities of the last chunk, the first ones replaced by these."""
        rest = self.ids[2:]
        return [[logprobs[at] if at < len(logprobs) else -0.5, token, None] for at, token in enumerate(rest)]


class LyingEngine:
    """`lie` returns the events of a streamed answer; an answer that is not streamed joins them. While `answers` is
    cleared, the server accepts connections and answers nothing, as a process stopped by SIGSTOP does."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.label = "default"
        self.lie: Lie = lambda truth: truth.whole()
        self.url = ""
        self.paths: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            path = head.split()[1]
            length = next((int(line.split(":")[1]) for line in head.splitlines() if "content-length" in line), 0)
            body = await reader.readexactly(length)
            self.paths.append(path)
            await self.answers.wait()
            if path == "/generate":
                await self._generate(json.loads(body), writer)
            else:
                await self._describe(path, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the proxy has given up on this answer
        finally:
            writer.close()

    async def _describe(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/update_weight_version":
            self.label = json.loads(body)["new_version"]
        about = {"model_path": "base/model", "weight_version": self.label, "grammar_backend": "none"}
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + json.dumps(about).encode())
        await writer.drain()

    async def _generate(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        events = self.lie(Honest(request, self.ids, self.label))
        writer.write(_HEAD)
        if not request["stream"]:
            events = [_joined(events)]
        for event in events:
            await self.answers.wait()
            if isinstance(event, float):
                await writer.drain()
                await asyncio.sleep(event)
            elif isinstance(event, bytes):
                writer.write(event)
            else:
                data = json.dumps(event).encode()  # with NaN and Infinity, as Python's engines send them
                writer.write(b"data: " + data + b"\n\n" if request["stream"] else data)
            await writer.drain()
        if request["stream"]:
            writer.write(b"data: [DONE]\n\n")
            await writer.drain()


def _joined(events: list[Event]) -> Event:
    """Return the chunks joined into one answer; other events are sent as they are."""
    if not all(isinstance(event, dict) for event in events):
        return events[-1]
    *before, last = [event for event in events if isinstance(event, dict)]
    ids, scored = [], []
    for chunk in [*before, last]:
        ids += chunk["output_ids"]
        scored += chunk["meta_info"]["output_token_logprobs"]
    return {"output_ids": ids, "meta_info": {**last["meta_info"], "output_token_logprobs": scored}}


@asynccontextmanager
async def lying_engine(ids: list[int]) -> AsyncIterator[LyingEngine]:
    engine = LyingEngine(ids)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        engine.answers.set()
        server.close()
