"""A hostile client: `python -m benchmarks.chaos.hostile URL KEY --switch FILE`.

While the switch's file exists it sends one attack after another, with short pauses. At SIGTERM it prints, as JSON,
how often it sent each attack and which statuses it received. A status of 500 would be a crash of an endpoint.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

_PAUSE_S = 0.3
_ANSWER_S = 20.0
_IDLE_S = 1.0


class Hostile:
    """Attacks over raw sockets, because no client library would send them."""

    def __init__(self, url: str, key: str, model: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._key = key
        self._model = model
        self.statuses: dict[str, Counter[str]] = {}
        letters: list[object] = [{"role": "user", "content": "a"}] * 200_000
        long = {"role": "user", "content": "ab " * 7_000_000}
        tools = [_tool(number) for number in range(10_000)]
        bodies: dict[str, tuple[str, dict[str, object]]] = {
            "200,000 messages in chat": ("chat/completions", {"messages": letters}),
            "200,000 messages in Messages": ("messages", {"messages": letters, "max_tokens": 8}),
            "200,000 items in Responses": ("responses", {"input": letters}),
            "a message of 20 MB": (
                "chat/completions",
                {"messages": [long]},
            ),
            "10,000 tools": (
                "chat/completions",
                {"messages": letters[:1], "tools": tools},
            ),
            "3 million token ids": ("completions", {"prompt": [7] * 3_000_000}),
            "100,000 stop strings": ("chat/completions", {"messages": letters[:1], "stop": ["x"] * 100_000}),
            "an enormous n": ("chat/completions", {"messages": letters[:1], "n": 10**9}),
        }
        requests = {name: self._encode(path, body) for name, (path, body) in bodies.items()}
        requests["brackets 5 million deep"] = self._request("chat/completions", b"[" * 5_000_000)
        self._attacks: list[tuple[str, Callable[[], str]]] = [
            *((name, partial(self._sent, request)) for name, request in requests.items()),
            ("bodies without a key", self._without_key),
            ("a header without end", lambda: self._sent(b"GET / HTTP/1.1\r\nx: " + b"a" * (1 << 20))),
            ("silent connections", self._silent),
            ("no HTTP at all", lambda: self._sent(b"\x16\x03\x01" * 100 + b"\r\n\r\n")),
        ]

    def round(self, draw: random.Random) -> None:
        """Send one randomly chosen attack and record the status of the answer."""
        name, attack = draw.choice(self._attacks)
        try:
            status = attack()
        except TimeoutError:
            status = "no answer"
        except OSError:  # the proxy was killed meanwhile, or has closed the connection
            status = "cut"
        self.statuses.setdefault(name, Counter())[status] += 1

    def _encode(self, path: str, body: dict[str, object]) -> bytes:
        return self._request(path, json.dumps({"model": self._model, **body}).encode())

    def _request(self, path: str, body: bytes, *, key: bool = True) -> bytes:
        authorization = f"authorization: Bearer {self._key}\r\n" if key else ""
        head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\n{authorization}content-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def _sent(self, request: bytes) -> str:
        with socket.create_connection(self._address, timeout=_ANSWER_S) as connection:
            with suppress(OSError):  # refused before all was sent: the answer may be there all the same
                connection.sendall(request)
            answer = connection.recv(4096)
        return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"

    def _without_key(self) -> str:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n" + b"x" * 1_000_000
        return "+".join(sorted({self._sent(head) for _ in range(10)}))

    def _silent(self) -> str:
        with ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_connection(self._address, timeout=_ANSWER_S))
            time.sleep(_IDLE_S)
        return "held"


def _tool(number: int) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": f"tool_{number}", "description": "d", "parameters": parameters}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--model", required=True)
    parser.add_argument("--switch", type=Path, required=True, help="attacks are sent while this file exists")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    hostile = Hostile(options.url, options.key, options.model)
    draw = random.Random(options.seed)
    try:
        while True:
            if options.switch.exists():
                hostile.round(draw)
            time.sleep(_PAUSE_S)
    finally:
        print(json.dumps(hostile.statuses), flush=True)


if __name__ == "__main__":
    main()
