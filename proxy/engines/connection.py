"""One HTTP/1.1 connection to an engine, with one request at a time, parsed by httptools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from proxy.errors import BaseRlError, EngineTimeout, EngineUnavailable

# Longest wait for the end of a body whose content is complete already.
_RUN_OUT_SECONDS = 1.0

# Bytes that a slow reader may leave untaken; beyond this bound the socket is not read, which bounds the memory.
_UNREAD_BYTES = 1 << 20


class Connection(asyncio.Protocol):
    """One connection, with one exchange at a time. The parser calls the `on_` methods during `feed_data`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, among: set[Connection], is_excused: Callable[[], bool]
    ) -> None:
        self._loop = loop
        self._is_excused = is_excused
        self._among = among
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiter: asyncio.Future[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._silence_seconds = 0.0
        self._heard_at: float | None = None
        self._failure: BaseRlError | None = None
        self._keep: Callable[[Connection], None] | None = None
        self._has_head = self._is_framed = self._is_whole = False
        self._keeps_alive = self._closed = self._paused = False
        self._parts: list[bytes] = []
        self._unread = 0
        self.lost: asyncio.Future[None] = loop.create_future()
        self.status = 0
        self.idle_since = 0.0

    @property
    def is_reusable(self) -> bool:
        return self._is_whole and self._keeps_alive and not self._closed and not self._parts

    async def exchange(self, message: bytes, silence_seconds: float) -> bool:
        """Send a request and wait for the head of its answer; return False if the connection closed before that."""
        self._heard_at = None
        self._has_head = self._is_framed = self._is_whole = False
        self._sent_at = self._loop.time()
        self._silence_seconds = silence_seconds
        self._silence = self._loop.call_later(silence_seconds, self._check_silence)
        self._transport.write(message)
        try:
            while not self._has_head:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    return False
                await self._wait()
        except BaseException:
            self.close()
            raise
        return True

    async def part(self) -> bytes:
        while not self._parts:
            if self._is_whole:
                return b""
            if self._failure is not None:
                raise self._failure
            await self._wait()
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._unread = 0
        if self._paused and not self._closed:
            self._paused = False
            self._transport.resume_reading()
        return part

    def bound_silence(self, seconds: float) -> None:
        if self._silence is not None:
            self._stop_timer()
            self._silence_seconds = seconds
            self._silence = self._loop.call_later(seconds, self._check_silence)

    def run_out(self, keep: Callable[[Connection], None]) -> None:
        """Pass the connection to `keep` if its answer ends soon; close it otherwise."""
        if self._closed or self._failure is not None:
            return
        self._keep = keep
        self._stop_timer()
        self._silence = self._loop.call_later(_RUN_OUT_SECONDS, self.close)

    def close(self) -> None:
        self._keep = None
        self._stop_timer()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._among.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._among.discard(self)
        self._closed = True
        self.lost.set_result(None)
        if exc is None and self._failure is None and self._has_head and not self._is_framed:
            self._end()  # a body without a length ends with its connection
        elif not self._is_whole and self._heard_at is not None and self._failure is None:
            self._failure = lost_connection(
                str(exc) if exc is not None else "it was closed in the middle of an answer"
            )
        self._stop_timer()
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._is_whole:  # bytes without a request
            self.close()
            return
        self._heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(lost_connection(f"the answer is not HTTP ({error})"))
            return
        if self._unread > _UNREAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise ValueError("an answer without a request")

    def on_header(self, name: bytes, _value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._keeps_alive = self._parser.should_keep_alive()
        self._has_head = self.status >= 200  # 1xx only announce the answer

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._unread += len(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._end()

    def _end(self) -> None:
        self._is_whole = True
        self._stop_timer()
        keep, self._keep = self._keep, None
        if keep is not None and self._keeps_alive and not self._closed:
            self._parts.clear()
            keep(self)

    def fail(self, failure: BaseRlError) -> None:
        """Close the connection and raise the failure in whoever waits for it."""
        self._failure = failure
        self.close()
        self._wake()

    def _check_silence(self) -> None:
        # One timer per exchange. Bytes only record their time and do not move it, which would cost a timer each; when
        # it fires, it is set again for the rest.
        since = self._sent_at if self._heard_at is None else self._heard_at
        left = since + self._silence_seconds - self._loop.time()
        if left > 0 or self._paused or self._is_excused():
            self._silence = self._loop.call_later(left if left > 0 else self._silence_seconds, self._check_silence)
            return
        self.fail(EngineTimeout(f"the engine did not answer in time: nothing came for {self._silence_seconds:g} s"))

    def _stop_timer(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def lost_connection(why: str) -> EngineUnavailable:
    return EngineUnavailable(f"the connection to the engine was lost: {why}")
