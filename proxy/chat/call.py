"""A model call in the words that all dialects share: what is asked, by whom, and what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from proxy.contract.identifiers import SessionId, TurnId
from proxy.contract.turn import FinishReason
from proxy.credentials.service import Principal
from proxy.tokens.tool_calls import ToolCall


class RequestedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling that the client asks for; None where it says nothing."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: dict[str, float] | None = None


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `messages` are in the shape of chat completions, whatever the dialect; `tools` are what the
    template writes. `body` is the request as it came, without its messages. `warnings` tell the client what of its
    request has no effect.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    calls_allowed: bool
    parallel_calls: bool
    sampling: RequestedSampling
    stream: bool
    include_usage: bool
    logprobs: bool
    body: dict[str, Any]
    warnings: tuple[str, ...] = ()


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and what it says of the session. `body_digest` tells equal requests; `retry_count` is what the
    client's SDK says of this one, None where it says nothing."""

    principal: Principal
    path_session: str | None = None
    header_session: str | None = None
    group: str | None = None
    idempotency_key: str | None = None
    retry_count: int | None = None
    body_digest: bytes = b""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One shown token: its bytes, and its log-probability as sampled."""

    token: bytes
    logprob: float


class TextDelta(msgspec.Struct, frozen=True):
    """More of the answer's text, with the tokens that came since the last one where they were asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class CallDelta(msgspec.Struct, frozen=True):
    """A whole tool call, under the id by which the client will answer it."""

    id: str
    call: ToolCall


Delta = TextDelta | CallDelta


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is answered. `version` is the newest that produced one of its tokens; None without tokens."""

    turn_id: TurnId
    session_id: SessionId
    model: str
    run_name: str
    created: int
    text: str
    tool_calls: tuple[CallDelta, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    version: int | None
    logprobs: tuple[TokenLogprob, ...] | None

    @property
    def fingerprint(self) -> str | None:
        return None if self.version is None else f"{self.run_name}@{self.version}"


class Dialect(Protocol):
    """A wire format. It is given answers and makes of them what its clients read."""

    name: str

    def response(self, answer: Answer) -> dict[str, Any]:
        """The whole answer as JSON; what is recorded, and what a repeated request gets."""
        ...

    def opening(self, head: StreamHead) -> bytes:
        """What a stream begins with."""
        ...

    def delta(self, head: StreamHead, delta: Delta) -> bytes: ...

    def closing(self, head: StreamHead, response: Mapping[str, Any]) -> bytes:
        """What a stream ends with, once the turn is recorded."""
        ...

    def replay(self, head: StreamHead, response: Mapping[str, Any]) -> bytes:
        """A recorded answer as a whole stream."""
        ...

    def failure(self, envelope: Mapping[str, Any]) -> bytes:
        """An error in mid-stream, and the end."""
        ...


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """What all chunks of a stream carry."""

    turn_id: str
    model: str
    created: int
    include_usage: bool
    logprobs: bool
