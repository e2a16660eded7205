"""Read the replies of `/generate`: chunks of new tokens, or the engine's error.

Every reply is checked here, before any other part of the proxy sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any

import msgspec

from proxy.engines.bounds import HIGHEST_LOGPROB, ReplyBounds, checked_logprobs
from proxy.engines.protocol import EngineChunk, EngineFinish, LabelSpan
from proxy.errors import (
    AdapterNotLoaded,
    BaseRlError,
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidEngineReply,
    InvalidRequest,
    UnsupportedParameter,
)

# Log-probabilities below this one mark tokens that a grammar's mask excludes.
_IMPOSSIBLE = -1e30
_NAMED_SPANS = 4
# Most spans and characters of a reply that an error message repeats: an engine may send any number.
_MESSAGE_CHARACTERS = 2000
# SGLang answers every refusal with status 400. Only its words tell which kind it is.
_CONSTRAINT_WORDS = ("Failed to compile", "Grammar preprocessing", "Grammar-based generation", "the constraint")
_CONTEXT_WORDS = ("context length", "longer than the model")
_ADAPTER_WORDS = "LoRA adapter"


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
    prompt_tokens: int | None = None
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    output_top_logprobs: list[list[tuple[float, int, Any]] | None] | None = None
    weight_versions: list[_Span] | None = None
    adapter: str | msgspec.UnsetType | None = msgspec.UNSET


class Reply(msgspec.Struct, frozen=True):
    """A whole answer of `/generate`, or one chunk of a streamed one."""

    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: dict[str, Any] | str | None = None


# Built once, because building a decoder takes longer than reading a short reply.
_DECODER = msgspec.json.Decoder(Reply)

_UNBOUNDED = ReplyBounds()


class ReplyParser:
    """Checks the replies to one request against its bounds, and turns them into chunks of new tokens.

    Engines stream increments or, without SGLang's `--incremental-streaming-output`, all tokens so far at every step.
    The length of a reply tells the two apart: `completion_tokens` always counts the whole request. `adapter` is the
    LoRA adapter that the request named.
    """

    def __init__(self, bounds: ReplyBounds = _UNBOUNDED, adapter: str | None = None) -> None:
        self._bounds = bounds
        self._adapter = adapter
        self._ids: list[int] = []
        self.finished = False
        self.first_label: str | None = None
        """The label of the weights that produced the first token; None before it came."""

    def parse(self, data: bytes | str) -> EngineChunk:
        """Return the new tokens. Raise InvalidEngineReply for an impossible reply, and the error that the engine
        sent."""
        try:
            reply = _DECODER.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidEngineReply(f"it cannot be read: {error}") from error
        if reply.error is not None:
            code = reply.error.get("code") if isinstance(reply.error, dict) else None
            raise refusal_of(code if isinstance(code, int) else 500, message_of(msgspec.json.encode(reply.error)))
        meta = reply.meta_info
        if meta is None:
            raise InvalidEngineReply("it has no meta_info")
        # Read before the tokens: SGLang sends a token along with a refusal in mid-stream, without its
        # log-probability.
        finish = _finish_of(meta.finish_reason)
        chunk = self._chunk(reply, meta, finish)
        if chunk.output_ids and self.first_label is None:
            self.first_label = meta.weight_versions[0].version if meta.weight_versions else meta.weight_version
        self._ids += chunk.output_ids
        self.finished = finish is not None
        return chunk

    def _chunk(self, reply: Reply, meta: _Meta, finish: EngineFinish | None) -> EngineChunk:
        total, seen = meta.completion_tokens, len(self._ids)
        if self.finished:
            raise InvalidEngineReply("it continues after its end")
        if total < seen:
            raise InvalidEngineReply(f"it counts {total} tokens after {seen} of them came")
        self._bounds.check_counts(total, meta.prompt_tokens)
        ids = self._new(reply.output_ids, total, "output ids")
        if seen and len(reply.output_ids) == total > len(ids) and reply.output_ids[:seen] != self._ids:
            raise InvalidEngineReply("tokens that it had sent before have changed")
        self._bounds.check_ids(ids)
        scored = self._new(meta.output_token_logprobs, total, "log-probabilities")
        if [each[1] for each in scored] != ids:
            raise InvalidEngineReply("its log-probabilities belong to other tokens than its output ids")
        return EngineChunk(
            output_ids=tuple(ids),
            logprobs=checked_logprobs([each[0] for each in scored]),
            top_logprobs=self._top(meta),
            finish=finish,
            spans=() if finish is None else _spans_of(meta, self._adapter),
        )

    def parse_all(self, events: Sequence[bytes]) -> Iterator[EngineChunk]:
        """Join the events that came together into one chunk, so that a slow reader catches up.

        Yield nothing for events without tokens. Raise like `parse`, after yielding the chunks before the wrong one.
        """
        chunks: list[EngineChunk] = []
        try:
            for data in events:
                chunk = self.parse(data)
                if chunk.output_ids or chunk.finish is not None:
                    chunks.append(chunk)
        except BaseRlError:
            if chunks:
                yield joined(chunks)
            raise
        if chunks:
            yield joined(chunks)

    def _top(self, meta: _Meta) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Return the most probable tokens at each new position, without those that a grammar's mask excludes, which
        SGLang reports with the lowest number there is."""
        if not meta.output_top_logprobs:
            return ()
        new = self._new(meta.output_top_logprobs, meta.completion_tokens, "lists of top log-probabilities")
        self._bounds.check_ids([token for ranked in new for _, token, _ in ranked or ()])
        if any(not logprob <= HIGHEST_LOGPROB for ranked in new for logprob, _, _ in ranked or ()):
            raise InvalidEngineReply("a top log-probability is above 0")
        return tuple(
            tuple((token, logprob) for logprob, token, _ in ranked or () if logprob > _IMPOSSIBLE) for ranked in new
        )

    def _new(self, items: list[Any], total: int, what: str) -> list[Any]:
        """Return the items of the new tokens, from a list of these alone or of all tokens so far."""
        seen = len(self._ids)
        if len(items) == total - seen:
            return items
        if len(items) == total:
            return items[seen:]
        raise InvalidEngineReply(f"it has {len(items)} {what}, where {seen} of {total} tokens came before")


def joined(chunks: list[EngineChunk]) -> EngineChunk:
    """Return neighbouring chunks of one answer as one."""
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
    """Return the proxy's error for the engine's refusal of a generation."""
    if status in {HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY}:
        # The proxy chose the adapter, so its absence is no fault of the client's request.
        if _ADAPTER_WORDS in message:
            return AdapterNotLoaded(f"the engine does not hold the adapter of the call: {message}")
        if any(words in message for words in _CONTEXT_WORDS):
            return ContextLengthExceeded(message)
        constrained = any(words in message for words in _CONSTRAINT_WORDS)
        return UnsupportedParameter(message) if constrained else InvalidRequest(message)
    return failure_of(status, message)


def failure_of(status: int, message: str) -> BaseRlError:
    """Return the proxy's error for the engine's refusal of a control call."""
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return EngineUnavailable(f"the engine takes no requests: {message}")
    return EngineFailed(f"the engine answered {status}: {message}")


def message_of(content: bytes) -> str:
    """Return the message of an error body, cut to a bounded length. SGLang sends several JSON shapes, and plain
    text."""
    return _message_in(content)[:_MESSAGE_CHARACTERS]


def _message_in(content: bytes) -> str:
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return content.decode(errors="replace").strip()
    for _ in range(2):  # {"error": {"message": …}} is the deepest shape
        if isinstance(body, dict):
            body = body.get("error") or body.get("message") or body.get("error_message") or body
    return body if isinstance(body, str) else msgspec.json.encode(body).decode()


def _finish_of(reason: _FinishReason | None) -> EngineFinish | None:
    if reason is None:
        return None
    if reason.status_code is not None:
        raise refusal_of(reason.status_code, reason.message or "aborted by the engine")
    try:
        return EngineFinish(reason.type)
    except ValueError as error:
        raise InvalidEngineReply(f"it ended with {reason.type!r}") from error


def _spans_of(meta: _Meta, adapter: str | None) -> tuple[LabelSpan, ...]:
    """Return which weights produced which tokens. Raise InvalidEngineReply unless the spans cover all in order."""
    count = meta.completion_tokens
    spans = meta.weight_versions
    if spans is None:
        spans = [_Span(version=meta.weight_version, start=0, end=count)]
    spans = [span for span in spans if span.end > span.start]
    edges = [0]
    for span in spans:
        edges += (span.start, span.end)
    if edges[::2] != [*edges[1::2], count]:
        named = [(span.version, span.start, span.end) for span in spans[:_NAMED_SPANS]]
        raise InvalidEngineReply(f"its weight versions do not cover its {count} tokens: {named}")
    # SGLang's answer does not name the adapter that it used, and labels every span by its base model.
    if adapter is not None and meta.adapter is msgspec.UNSET:
        return (LabelSpan(label=adapter, start=0, end=count),) if count else ()
    return tuple([LabelSpan(label=span.version, start=span.start, end=span.end) for span in spans])
