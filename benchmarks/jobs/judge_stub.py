"""A judge's model in a process of its own: `python -m benchmarks.jobs.judge_stub PORT MILLISECONDS`.

It answers every request for a chat completion with a score, after so many milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from benchmarks.proxy.stub import Stub


def _answer() -> bytes:
    grade = json.dumps({"rationale": "The answer adds the numbers, and says how.", "score": 0.75})
    choice = {"index": 0, "message": {"role": "assistant", "content": grade}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 300, "completion_tokens": 20, "total_tokens": 320}
    body = json.dumps({"id": "chatcmpl-judge", "object": "chat.completion", "choices": [choice], "usage": usage})
    return f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


class JudgeStub(Stub):
    """Answers late, as a model does."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def answer(self, head: bytes, body: bytes) -> None:
        asyncio.get_running_loop().call_later(self._seconds, self._send, _answer())

    def _send(self, answer: bytes) -> None:
        if not self._transport.is_closing():  # the proxy may have ended the connection meanwhile
            self._transport.write(answer)


async def serve(port: int, seconds: float) -> None:
    """Answer until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: JudgeStub(seconds), "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]) / 1000))
