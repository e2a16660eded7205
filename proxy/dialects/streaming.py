"""Send answers to a client, whole or as server-sent events, and notice when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from proxy.calls.call import UNRECORDED_HEADER, Answer, Dialect, ModelCall, StreamHead, StreamWriter
from proxy.calls.generation import Generation
from proxy.dialects.events import PING
from proxy.errors import BaseRlError
from proxy.http.errors import error_response
from proxy.limits.share import Kind, Standing
from proxy.log import logger

# Status in the log of a request whose client left; no client receives it.
_LEFT = 499

# Seconds before anything watches whether the client leaves: watching costs a task, and most answers come sooner.
_UNWATCHED_SECONDS = 0.05

_UNITS = {Kind.CALLS: "requests", Kind.TOKENS: "tokens"}

_LOG = logger(__name__)


async def whole_answer(
    request: Request, generation: Generation, call: ModelCall, dialect: Dialect, headers: Mapping[str, str]
) -> Response:
    """Wait for the recorded answer and send it. Raise the call's error. Release the generation in either case."""
    try:
        if not await generation.ended_within(_UNWATCHED_SECONDS):
            leaving = asyncio.ensure_future(client_left(request.receive))
            try:
                if not await generation.ended_before(leaving):
                    return Response(status_code=_LEFT)
            finally:
                leaving.cancel()
        answer = await generation.wait()
        return json_response(dialect.response(call, answer), {**headers, **unrecorded_header(answer)})
    finally:
        generation.release()


def unrecorded_header(known: Answer | StreamHead) -> dict[str, str]:
    """Return the header that says why an answer is not in the store; none for an answer that is."""
    return {} if known.unrecorded is None else {UNRECORDED_HEADER: known.unrecorded}


def limit_headers(standings: Sequence[Standing]) -> dict[str, str]:
    """Return the headers with the rest of the run's limits, by the names that OpenAI uses."""
    headers = {}
    for standing in standings:
        unit = _UNITS[standing.kind]
        headers[f"x-ratelimit-limit-{unit}"] = str(standing.limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(standing.left)
        headers[f"x-ratelimit-reset-{unit}"] = f"{standing.reset_seconds:.3f}s"
    return headers


class JsonResponse(Response):
    """A whole answer as JSON. Every call makes one, so the headers are encoded in one go: the base class takes some
    thirty function calls for them."""

    media_type = "application/json"

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.body = body
        self.raw_headers = [
            *[(name.encode("latin-1"), text.encode("latin-1")) for name, text in headers.items()],
            (b"content-length", b"%d" % len(body)),
            (b"content-type", b"application/json"),
        ]


def json_response(value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return JsonResponse(msgspec.json.encode(value), headers or {})


async def client_left(receive: Receive) -> None:
    """Wait until the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def head_of(answer: Answer) -> StreamHead:
    """Return the head of a stream that repeats a recorded answer."""
    return StreamHead(
        turn_id=answer.turn_id,
        session_id=answer.session_id,
        model=answer.model,
        created=answer.created,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        choices=len(answer.choices),
        unrecorded=answer.unrecorded,
        attempt=answer.attempt,
        warnings=answer.warnings,
    )


def whole_stream(writer: StreamWriter, answer: Answer) -> bytes:
    """Write a recorded answer as a whole stream."""
    return writer.opening() + b"".join(map(writer.delta, answer.deltas())) + writer.closing(answer)


class EventStream(Response):
    """A generation as server-sent events. `follows`: another request started the generation and reads its deltas, so
    this one sends the whole answer at the end.

    The response begins with the first delta, or after `ping_seconds` without one, so that an early failure still has
    an error status. The last event is sent after the turn's commit. Releases the generation.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        writer: StreamWriter,
        *,
        headers: Mapping[str, str],
        ping_seconds: float,
        follows: bool,
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer
        self._ping_seconds = ping_seconds
        self._follows = follows
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._stream(scope, receive, send))
        try:
            await asyncio.wait((sending,), timeout=_UNWATCHED_SECONDS)
            if not sending.done():
                leaving = asyncio.ensure_future(client_left(receive))
                try:
                    await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    leaving.cancel()
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            self._generation.release()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await (self._relay_answer(send) if self._follows else self._relay_deltas(send))
            answer = await self._generation.wait()
        except BaseRlError as error:
            if not self._begun:
                await error_response(error, scope)(scope, receive, send)
                return
            await self._send(send, self._writer.failure(error.envelope()), last=True)
        else:
            ending = whole_stream(self._writer, answer) if self._follows else self._writer.closing(answer)
            await self._send(send, ending, last=True)

    async def _relay_deltas(self, send: Send) -> None:
        while (deltas := await self._generation.deltas(self._ping_seconds)) is not None:
            opening = b"" if self._begun else self._writer.opening()
            events = b"".join(map(self._writer.delta, deltas)) or self._writer.ping()
            await self._send(send, opening + events)
        if not self._begun and self._generation.answer is not None:
            await self._send(send, self._writer.opening())

    async def _relay_answer(self, send: Send) -> None:
        while not self._generation.done:
            if not await self._generation.ended_within(self._ping_seconds):
                await self._send(send, PING)

    async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": not last})
