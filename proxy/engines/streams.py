"""Read the server-sent events of a streamed answer, and notice when it stops producing tokens."""

from __future__ import annotations

import asyncio

from proxy.engines.connections import LARGEST_BODY, Reply
from proxy.errors import EngineTimeout, InvalidEngineReply

_DATA = b"data: "
_DONE = b"[DONE]"


class EventLines:
    """Splits a stream of server-sent events, which arrives in arbitrary parts, into the data of its events. `over` is
    True after the last event.

    Raises InvalidEngineReply for a line of more than `limit` bytes: a line that never ends would fill the memory.
    """

    def __init__(self, limit: int = LARGEST_BODY) -> None:
        self._limit = limit
        self._line: list[bytes] = []
        self._size = 0
        self.over = False

    def feed(self, part: bytes) -> list[bytes]:
        """Return the data of the events that `part` completes."""
        first, *further = part.split(b"\n")
        self._line.append(first)
        self._size = self._size + len(first) if not further else len(further[-1])
        if self._size > self._limit:
            raise InvalidEngineReply(f"an event has more than {self._limit} bytes")
        if not further:
            return []
        lines = [b"".join(self._line), *further]
        self._line = [lines.pop()]
        events = [line[len(_DATA) :].rstrip() for line in lines if line.startswith(_DATA)]
        if _DONE in events:
            self.over = True
            return events[: events.index(_DONE)]
        return events


class TokenProgress:
    """Detects a streamed answer that stalls after its first tokens.

    The connection's silence bound covers a stream without bytes; `check` covers a stream whose chunks hold no tokens.
    """

    def __init__(self, reply: Reply, stall_seconds: float) -> None:
        self._reply = reply
        self._stall_seconds = stall_seconds
        self._loop = asyncio.get_running_loop()
        self._last_token_at: float | None = None

    def tokens_came(self) -> None:
        """Record that new tokens arrived; the first ones replace the request's silence bound by the stall bound."""
        if self._last_token_at is None:
            self._reply.bound_silence(self._stall_seconds)
        self._last_token_at = self._loop.time()

    def check(self) -> None:
        """Raise EngineTimeout if the last token arrived too long ago. Before the first token there is no bound,
        because a long prompt takes long."""
        if self._last_token_at is not None and self._loop.time() - self._last_token_at > self._stall_seconds:
            raise EngineTimeout(f"the engine stopped in the middle: no token came for {self._stall_seconds:g} s")
