"""A judge's model in a process of its own: `python -m benchmarks.jobs.judge_stub PORT MILLISECONDS [PERCENT]`.

It answers every request for a chat completion with a score, after so many milliseconds, and this percentage of them
with an error.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

import uvloop

from benchmarks.proxy.stub import Stub

SCORE = 0.75
_FAILURE = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


def _answer() -> bytes:
    grade = json.dumps({"rationale": "The answer adds the numbers, and says how.", "score": SCORE})
    choice = {"index": 0, "message": {"role": "assistant", "content": grade}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 300, "completion_tokens": 20, "total_tokens": 320}
    body = json.dumps({"id": "chatcmpl-judge", "object": "chat.completion", "choices": [choice], "usage": usage})
    return f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


class JudgeStub(Stub):
    """Answers late, as a model does, and fails in a share of its answers."""

    def __init__(self, seconds: float, failing: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._failing = failing

    def answer(self, head: bytes, body: bytes) -> None:
        answer = _FAILURE if random.random() < self._failing else _answer()
        asyncio.get_running_loop().call_later(self._seconds, self._send, answer)

    def _send(self, answer: bytes) -> None:
        if not self._transport.is_closing():  # the proxy may have ended the connection meanwhile
            self._transport.write(answer)


async def serve(port: int, seconds: float, failing: float) -> None:
    """Answer until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: JudgeStub(seconds, failing), "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    percent = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]) / 1000, percent / 100))
