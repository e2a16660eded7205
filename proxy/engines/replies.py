"""Reads what `/generate` answers: chunks of new tokens, or the error that the engine gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any

import msgspec

from proxy.engines.interface import EngineChunk, EngineFinish, LabelSpan
from proxy.errors import (
    BaseRlError,
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    UnsupportedParameter,
)

IMPOSSIBLE = -1e30
CONSTRAINT_WORDS = ("Failed to compile", "Grammar preprocessing", "Grammar-based generation", "the constraint")
CONTEXT_WORDS = ("context length", "longer than the model")


class _FinishReason(msgspec.Struct, frozen=True):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True):
    completion_tokens: int
    weight_version: str
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    output_top_logprobs: list[list[tuple[float, int, Any]] | None] | None = None
    weight_versions: list[_Span] | None = None


class Reply(msgspec.Struct, frozen=True):
    """One answer of `/generate`, or one chunk of it."""

    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: dict[str, Any] | str | None = None


_DECODER = msgspec.json.Decoder(Reply)


class ReplyParser:
    """Turns the replies of one request into chunks of new tokens.

    Engines stream increments or, without SGLang's `--incremental-streaming-output`, everything so far at every step.
    Which one a reply is shows by its length: `completion_tokens` always counts the whole request.
    """

    def __init__(self) -> None:
        self._seen = 0
        self.finished = False

    def parse(self, data: bytes | str) -> EngineChunk:
        """Raises EngineFailed for a reply that is no reply, or whose ids and log-probabilities do not match."""
        try:
            reply = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"the engine's answer cannot be read: {error}") from error
        if reply.error is not None:
            code = reply.error.get("code") if isinstance(reply.error, dict) else None
            raise refusal_of(code if isinstance(code, int) else 500, message_of(msgspec.json.encode(reply.error)))
        meta = reply.meta_info
        if meta is None:
            raise EngineFailed("the engine's answer has no meta_info")
        # Before its tokens: SGLang sends one along with a refusal in mid-stream, and nothing that belongs to it.
        finish = _finish_of(meta.finish_reason)
        ids = self._new(reply.output_ids, meta.completion_tokens, "output ids")
        scored = self._new(meta.output_token_logprobs, meta.completion_tokens, "log-probabilities")
        if [each[1] for each in scored] != ids:
            raise EngineFailed("the engine's log-probabilities belong to other tokens than its output ids")
        logprobs = tuple([each[0] for each in scored if each[0] is not None])
        if len(logprobs) != len(ids):
            raise EngineFailed("the engine left out log-probabilities")
        top = self._top(meta)
        self._seen = meta.completion_tokens
        self.finished = finish is not None
        return EngineChunk(
            output_ids=tuple(ids),
            logprobs=logprobs,
            top_logprobs=top,
            finish=finish,
            spans=() if finish is None else _spans_of(meta),
        )

    def parse_all(self, events: Sequence[bytes]) -> Iterator[EngineChunk]:
        """What came together as one chunk, so that a reader that is behind catches up; nothing where it says nothing.

        Raises like `parse`, after giving what came before.
        """
        chunks: list[EngineChunk] = []
        try:
            for data in events:
                chunk = self.parse(data)
                if chunk.output_ids or chunk.finish is not None:
                    chunks.append(chunk)
        except BaseRlError:
            if chunks:
                yield _joined(chunks)
            raise
        if chunks:
            yield _joined(chunks)

    def _top(self, meta: _Meta) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Without tokens that a grammar's mask keeps out, which SGLang tells of with the lowest number there is."""
        if not meta.output_top_logprobs:
            return ()
        new = self._new(meta.output_top_logprobs, meta.completion_tokens, "lists of top log-probabilities")
        return tuple(
            tuple((token, logprob) for logprob, token, _ in ranked or () if logprob > IMPOSSIBLE) for ranked in new
        )

    def _new(self, items: list[Any], total: int, what: str) -> list[Any]:
        if len(items) == total - self._seen:
            return items
        if len(items) == total:
            return items[self._seen :]
        raise EngineFailed(
            f"the engine sent {len(items)} {what}, having sent {self._seen} of the {total} tokens that it reports"
        )


def _joined(chunks: list[EngineChunk]) -> EngineChunk:
    if len(chunks) == 1:
        return chunks[0]
    return EngineChunk(
        output_ids=tuple(chain.from_iterable(chunk.output_ids for chunk in chunks)),
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        top_logprobs=tuple(chain.from_iterable(chunk.top_logprobs for chunk in chunks)),
        finish=chunks[-1].finish,
        spans=chunks[-1].spans,
    )


def refusal_of(status: int, message: str) -> BaseRlError:
    """What an error answer to a generation means."""
    if status in {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}:
        if any(words in message for words in CONTEXT_WORDS):
            return ContextLengthExceeded(message)
        constrained = any(words in message for words in CONSTRAINT_WORDS)
        return UnsupportedParameter(message) if constrained else InvalidRequest(message)
    return failure_of(status, message)


def failure_of(status: int, message: str) -> BaseRlError:
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return EngineUnavailable(f"the engine takes no requests: {message}")
    return EngineFailed(f"the engine answered {status}: {message}")


def message_of(content: bytes) -> str:
    """The message in an error body: SGLang has several shapes, and plain text."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content.decode(errors="replace").strip()
    for _ in range(2):
        if isinstance(body, dict):
            body = body.get("error") or body.get("message") or body
    return body if isinstance(body, str) else msgspec.json.encode(body).decode()


def _finish_of(reason: _FinishReason | None) -> EngineFinish | None:
    if reason is None:
        return None
    if reason.status_code is not None:
        raise refusal_of(reason.status_code, reason.message or "aborted by the engine")
    try:
        return EngineFinish(reason.type)
    except ValueError as error:
        raise EngineFailed(f"the engine ended with {reason.type!r}") from error


def _spans_of(meta: _Meta) -> tuple[LabelSpan, ...]:
    """Which weights produced which tokens. Raises EngineFailed unless the spans cover all of them in order."""
    count = meta.completion_tokens
    spans = meta.weight_versions
    if spans is None:
        spans = [_Span(version=meta.weight_version, start=0, end=count)]
    spans = [span for span in spans if span.end > span.start]
    edges = [0, *(edge for span in spans for edge in (span.start, span.end)), count]
    if edges[::2] != edges[1::2]:
        raise EngineFailed(f"the engine's weight versions do not cover its {count} tokens: {meta.weight_versions}")
    return tuple(LabelSpan(label=span.version, start=span.start, end=span.end) for span in spans)
