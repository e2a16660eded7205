"""A model call in the words that all dialects share: what is asked, by whom, and what is answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, Self

import msgspec

from proxy.auth.service import Principal
from proxy.contract.identifiers import SessionId, TurnId
from proxy.contract.turn import FinishReason
from proxy.limits.share import Standing
from proxy.tokens.formats import ToolCall


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


class ToolUse(StrEnum):
    """Whether the answer may hold tool calls. `required`: it is one, of any tool or of the one that is named."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`name` with `required` only: the one function to be called."""

    use: ToolUse = ToolUse.AUTO
    name: str | None = None


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What form the answer's text must have: any JSON object, or JSON of a schema. `where` in the request it is
    asked for."""

    where: str = "response_format.json_schema"
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool = False


class PreviousAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded answer that a call goes on from."""

    turn_id: TurnId


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `messages` are in the shape of chat completions, whatever the dialect; `tools` are what the
    template writes, `tool_places` where in the request they stand, by name, where that is not `tools[N].function`;
    `template_arguments` is what else the template is given. `prompts` are those of a call without messages:
    texts or token ids; `echoes` is what of each is said again before its answers, empty where nothing is. `n`
    answers are generated to each prompt. `previous` is the answer that the client names instead of sending the
    conversation; `messages` are whole all the same. `prefill` is what the answer begins with: prompt, which the model
    goes on from. `body` is the request as it came, without its messages. `warnings` tell the client what of its
    request has no effect. `is_large`: work on the call would keep others waiting, so that a worker thread does it.
    `body_bytes` is the length of the body.
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
        """The same, with more to warn of."""
        return msgspec.structs.replace(self, warnings=(*self.warnings, *warnings)) if warnings else self

    @property
    def calls_allowed(self) -> bool:
        """Whether tool calls are looked for in the answer."""
        return bool(self.tools) and self.tool_choice.use is not ToolUse.NONE


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and what the request says of the session beside its body: the path, and the headers that
    `sessions.identification` reads. `body_digest` tells equal requests, of callers that say that they may repeat one;
    `retry_count` is what the client's SDK says of this one, None where it says nothing."""

    principal: Principal
    path_session: str | None = None
    session_headers: dict[str, str] = {}
    idempotency_key: str | None = None
    retry_count: int | None = None
    body_digest: bytes = b""


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have come: its bytes, and its log-probability."""

    token: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One shown token: its bytes, and its log-probability as sampled. `top`: the most probable ones in its place,
    best first, as many as were asked for."""

    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class TextDelta(msgspec.Struct, frozen=True):
    """More of an answer's text, with the tokens that came since the last one where they were asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str
    choice: int = 0


class CallDelta(msgspec.Struct, frozen=True):
    """A whole tool call, under the id by which the client will answer it."""

    id: str
    call: ToolCall
    choice: int = 0


Delta = TextDelta | ReasoningDelta | CallDelta


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the answers to a call, a turn of its own. `version` is the newest that produced one of its tokens;
    None without tokens. `reasoning_tokens` are those of `completion_tokens` that are thought. `stopped_by` is the
    client's stop string that ended it, `completed` when it did, in seconds since the epoch. `logprobs` is None where
    they were not asked for. `failure` says why the turn failed, for operators: no dialect writes it."""

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
    """What every dialect adds to an answer that was not recorded; clients pass over what they do not know."""
    return {} if unrecorded is None else {"base_rl": {"unrecorded": unrecorded}}


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An answer in no dialect: each dialect writes it in its own form, also when the request is sent again.

    `turn_id` is that of the first choice, and the answer's own. `created` is in seconds since the epoch. A prompt is
    counted once, however many choices it has. `choices` are in order, those of the first prompt first. In the store
    every turn has the answer with its own choice alone; the first one's names its `siblings`, the turns of the
    others in order. `unrecorded` says why there are no such turns; nearly always there are. `attempt` is the
    session's number among those of its name. `warnings` tell the client what of its sampling was changed, and that
    its session has ended; they are recorded, so that a repeated request is told the same.
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
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def fingerprint(self) -> str | None:
        """`run@version` of the newest version at work; None where there are no tokens."""
        versions = [choice.version for choice in self.choices if choice.version is not None]
        return f"{self.run_name}@{max(versions)}" if versions else None

    def deltas(self) -> Iterator[Delta]:
        """The answer as if it came in one piece: what a stream of it tells."""
        for index, choice in enumerate(self.choices):
            if choice.reasoning:
                yield ReasoningDelta(choice.reasoning, index)
            if choice.text:
                yield TextDelta(choice.text, choice.logprobs or (), index)
            for made in choice.tool_calls:
                yield CallDelta(made.id, made.call, index)


class StreamHead(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an answer that is known when its stream begins. `choices` is how many there will be.
    `unrecorded` says why it will not be recorded, where that is certain. `standings` are those of the run's limits,
    if it has any. `attempt` and `warnings` are the answer's."""

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
        """What the stream begins with."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def ping(self) -> bytes:
        """Something that keeps the connection alive and that clients pass over."""
        ...

    def closing(self, answer: Answer) -> bytes:
        """What the stream ends with, once the turn is recorded."""
        ...

    def failure(self, envelope: Mapping[str, Any]) -> bytes:
        """An error in mid-stream, and the end."""
        ...


class Dialect(Protocol):
    """A wire format. It is given answers and makes of them what its clients read."""

    name: str

    def response(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        """The whole answer as JSON."""
        ...

    def stream(self, call: ModelCall, head: StreamHead) -> StreamWriter: ...
