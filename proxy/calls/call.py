"""The types of a model call that all dialects share: the request, its sender, and the answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, Self

import msgspec

from proxy.auth.access import Principal
from proxy.contract.identifiers import SessionId, TurnId
from proxy.contract.turn import FinishReason
from proxy.limits.share import Standing
from proxy.tokens.formats import ToolCall


class RequestedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling that the client asks for; None for parameters that it leaves out."""

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


class ToolUse(StrEnum):
    """Whether the answer may hold tool calls. `required`: it is a call of any tool, or of the tool that is named."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How tools may be used. `name` is the one function that must be called; only with `required`."""

    use: ToolUse = ToolUse.AUTO
    name: str | None = None


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form that the answer's text must have: any JSON object, or JSON that matches `schema`. `where` is the place
    in the request that asks for it."""

    where: str = "response_format.json_schema"
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool = False


class PreviousAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded answer that a call continues (`previous_response_id`)."""

    turn_id: TurnId


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request, in no dialect.

    `messages` have the shape of chat completions, whatever the dialect. `tools` are written by the template;
    `tool_places` maps the names of tools to their places in the request, where these are not `tools[N].function`.
    `template_arguments` are further arguments of the template. `prompts` are the texts or token ids of a call without
    messages; `echoes` are the parts of them that are repeated before the answers, if any. `n` answers are generated
    for each prompt. `previous` is the answer that the client names instead of sending the conversation; `messages`
    hold the whole conversation in that case too. `prefill` is the beginning of the answer, which the client sent: it
    is part of the prompt. `body` is the request as it came, without its messages. `warnings` tell the client which
    parts of its request have no effect. `is_large`: a worker thread does the work on the call, which would keep
    others waiting. `body_bytes` is the length of the body.
    """

    model: str
    messages: Sequence[dict[str, Any]]
    sampling: RequestedSampling
    body: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    tool_places: dict[str, str] = {}
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    answer_format: AnswerFormat | None = None
    template_arguments: dict[str, Any] = {}
    prompts: tuple[str | tuple[int, ...], ...] = ()
    echoes: tuple[str, ...] = ()
    previous: PreviousAnswer | None = None
    prefill: str = ""
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    warnings: tuple[str, ...] = ()
    is_large: bool = False
    body_bytes: int = 0

    def warned(self, warnings: tuple[str, ...]) -> Self:
        """Return the call with further warnings."""
        return msgspec.structs.replace(self, warnings=(*self.warnings, *warnings)) if warnings else self

    @property
    def calls_allowed(self) -> bool:
        """Whether the answer may hold tool calls."""
        return bool(self.tools) and self.tool_choice.use is not ToolUse.NONE


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request, and what its path and headers say about the session.

    `session_headers` are the headers that `sessions.identification` reads. `body_digest` recognises equal requests;
    it is empty unless the client announces that it may repeat requests. `retry_count` is the count of its SDK, None
    if it sends none.
    """

    principal: Principal
    path_session: str | None = None
    session_headers: dict[str, str] = {}
    idempotency_key: str | None = None
    retry_count: int | None = None
    body_digest: bytes = b""


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the most probable tokens at a position: its bytes, and its log-probability."""

    token: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One shown token: its bytes, and its log-probability as sampled. `top`: the most probable tokens at its
    position, best first, as many as the client asked for."""

    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class TextDelta(msgspec.Struct, frozen=True):
    """More of an answer's text, with its tokens if the client asked for log-probabilities."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of the reasoning that the model writes before its answer."""

    text: str
    choice: int = 0


class CallDelta(msgspec.Struct, frozen=True):
    """A whole tool call. The client sends its result under this id."""

    id: str
    call: ToolCall
    choice: int = 0


Delta = TextDelta | ReasoningDelta | CallDelta


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the answers to a call, recorded as a turn of its own.

    `version` is the newest policy version that produced one of its tokens; None without tokens. `reasoning_tokens` is
    the part of `completion_tokens` that is reasoning. `stopped_by` is the client's stop string that ended the answer,
    `completed` the time of its end in seconds since the epoch. `logprobs` is None if the client did not ask for them.
    `failure` says why the turn failed, for operators: no dialect writes it.
    """

    turn_id: TurnId
    text: str
    finish_reason: FinishReason
    completion_tokens: int
    reasoning: str = ""
    reasoning_tokens: int = 0
    tool_calls: tuple[CallDelta, ...] = ()
    version: int | None = None
    stopped_by: str | None = None
    completed: int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    failure: str | None = None


UNRECORDED_HEADER = "x-base-rl-unrecorded"
STORE_UNAVAILABLE = "store_unavailable"
"""Why an answer was not recorded."""


def marks(unrecorded: str | None) -> dict[str, Any]:
    """Return the field that every dialect adds to an answer that was not recorded; clients ignore unknown fields."""
    return {} if unrecorded is None else {"base_rl": {"unrecorded": unrecorded}}


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An answer, in no dialect. A dialect writes it in its own form, again when the request is repeated.

    `turn_id` is the id of the first choice's turn, and of the answer. `created` is in seconds since the epoch. A
    prompt is counted once, however many choices it has. `choices` are in order, those of the first prompt first. In
    the store, every turn has the answer with its own choice only; the first turn's names in `siblings` the turns of
    the other choices, in order. `unrecorded` is the reason if there are no such turns. `attempt` is the number of the
    session among the sessions of its name. `warnings` tell the client which of its sampling parameters were changed,
    and that its session has ended; they are recorded, so that a repeated request gets the same warnings.
    """

    turn_id: TurnId
    session_id: SessionId
    model: str
    run_name: str
    created: int
    prompt_tokens: int
    cached_tokens: int
    choices: tuple[Choice, ...]
    siblings: tuple[TurnId, ...] = ()
    unrecorded: str | None = None
    attempt: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def completion_tokens(self) -> int:
        return sum([choice.completion_tokens for choice in self.choices])

    @property
    def reasoning_tokens(self) -> int:
        return sum([choice.reasoning_tokens for choice in self.choices])

    @property
    def fingerprint(self) -> str | None:
        """`run@version` of the newest version that produced a token; None without tokens."""
        versions = [choice.version for choice in self.choices if choice.version is not None]
        return f"{self.run_name}@{max(versions)}" if versions else None

    def deltas(self) -> Iterator[Delta]:
        """Yield the whole answer as deltas of a stream."""
        for index, choice in enumerate(self.choices):
            if choice.reasoning:
                yield ReasoningDelta(choice.reasoning, index)
            if choice.text:
                yield TextDelta(choice.text, choice.logprobs or (), index)
            for made in choice.tool_calls:
                yield CallDelta(made.id, made.call, index)


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an answer that is known when its stream begins.

    `choices` is their number. `unrecorded` is the reason if it is certain that the answer will not be recorded.
    `standings` are the standings of the run's limits, if it has any. `attempt` and `warnings` are those of the
    answer.
    """

    turn_id: TurnId
    session_id: SessionId
    model: str
    created: int
    prompt_tokens: int
    cached_tokens: int
    choices: int
    unrecorded: str | None = None
    attempt: int | None = None
    standings: tuple[Standing, ...] = ()
    warnings: tuple[str, ...] = ()


class StreamWriter(Protocol):
    """One stream of server-sent events in a dialect. Its methods are called in the order given here."""

    def opening(self) -> bytes:
        """Return the first bytes of the stream."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def ping(self) -> bytes:
        """Return bytes that keep the connection alive and that clients ignore."""
        ...

    def closing(self, answer: Answer) -> bytes:
        """Return the last bytes of the stream, once the turn is recorded."""
        ...

    def failure(self, envelope: Mapping[str, Any]) -> bytes:
        """Return the bytes of an error in mid-stream, and the end of the stream."""
        ...


class Dialect(Protocol):
    """A wire format: it writes answers as its clients read them."""

    name: str

    def response(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        """Return the whole answer as a JSON object."""
        ...

    def stream(self, call: ModelCall, head: StreamHead) -> StreamWriter: ...
