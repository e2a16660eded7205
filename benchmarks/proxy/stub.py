"""A model server that answers chat completions at once: `python -m benchmarks.proxy.stub PORT`.

It stands behind LiteLLM and rllm-model-gateway. To a caller that asks for token ids (`return_token_ids`) it answers
with ids and log-probabilities, as vLLM does.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import msgspec
import uvloop

from benchmarks.proxy.conversations import ANSWER, MODEL_NAME

WORDS = ANSWER.split(" ")
IDS = list(range(100, 100 + len(WORDS)))
_COMMON: dict[str, Any] = {"id": "chatcmpl-stub", "created": 1700000000, "model": MODEL_NAME}
_USAGE = {"prompt_tokens": 60, "completion_tokens": len(WORDS), "total_tokens": 60 + len(WORDS)}


def _logprobs(words: list[str]) -> dict[str, Any]:
    return {"content": [{"token": word, "logprob": -1.0, "bytes": None, "top_logprobs": []} for word in words]}


def _whole(*, with_ids: bool) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER},
        "finish_reason": "stop",
        "logprobs": None,
    }
    more: dict[str, Any] = {}
    if with_ids:
        choice |= {"logprobs": _logprobs(WORDS), "token_ids": IDS}
        more = {"prompt_token_ids": list(range(60))}
    body = msgspec.json.encode({**_COMMON, "object": "chat.completion", "choices": [choice], "usage": _USAGE, **more})
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _event(delta: dict[str, Any], *, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return (
        b"data: " + msgspec.json.encode({**_COMMON, "object": "chat.completion.chunk", "choices": [choice]}) + b"\n\n"
    )


def _streamed(*, with_ids: bool) -> list[bytes]:
    events = [_event({"role": "assistant", "content": ""})]
    for index, word in enumerate(WORDS):
        more: dict[str, Any] = {"logprobs": _logprobs([word]), "token_ids": [IDS[index]]} if with_ids else {}
        events.append(_event({"content": word if index == 0 else f" {word}"}, **more))
    events += [_event({}, finish="stop"), b"data: [DONE]\n\n"]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = [f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in events]
    return [head + chunks[0], *chunks[1:], b"0\r\n\r\n"]


WHOLE = {with_ids: _whole(with_ids=with_ids) for with_ids in (False, True)}
STREAMED = {with_ids: _streamed(with_ids=with_ids) for with_ids in (False, True)}
_MODELS = msgspec.json.encode({"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})
MODELS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(_MODELS),
    _MODELS,
)


class Stub(asyncio.Protocol):
    """As much of HTTP/1.1 as the measured proxies use."""

    def __init__(self) -> None:
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # of uvloop, which has it by shape alone

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._received) < end + 4 + length:
                return
            body = self._received[end + 4 : end + 4 + length]
            self._received = self._received[end + 4 + length :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        with_ids = b'"return_token_ids"' in body
        if head.startswith(b"get "):
            self._transport.write(MODELS)
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._next(STREAMED[with_ids], 0)
        else:
            self._transport.write(WHOLE[with_ids])

    def _next(self, pieces: list[bytes], index: int) -> None:
        """Send one piece in each iteration of the event loop, so that a stream arrives in pieces."""
        self._transport.write(pieces[index])
        if index + 1 < len(pieces):
            asyncio.get_running_loop().call_soon(self._next, pieces, index + 1)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
