"""One model call: exact prompt ids, output ids, log-probabilities and the policy version of every token."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from proxy.contract.identifiers import SessionId, TurnId


class FinishReason(StrEnum):
    """The reason why the engine stopped, in the words of the OpenAI wire."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


class Cut(StrEnum):
    """The reason why an answer did not end by itself.

    `length`: it reached its bound on tokens, or the context's. `interrupted`: the client left, or the engine or the
    proxy ended the generation.
    """

    LENGTH = "length"
    INTERRUPTED = "interrupted"


class TurnState(StrEnum):
    """`truncated`: the client left, or the engine or the proxy ended the generation, before the client had the whole
    answer; the tokens generated so far are kept. `failed`: there is no answer; nothing of it is trained."""

    COMPLETE = "complete"
    TRUNCATED = "truncated"
    FAILED = "failed"


def cut_of(finish_reason: FinishReason | None, state: TurnState) -> Cut | None:
    """Return what cut the answer; None for a whole one, and where the finish reason is unknown.

    An answer that ended by itself is whole even if its client had left by then: such a turn is `truncated` with the
    finish reason `stop` or `tool_calls`.
    """
    if finish_reason is not FinishReason.LENGTH:
        return None
    return Cut.INTERRUPTED if state is TurnState.TRUNCATED else Cut.LENGTH


class Continuation(StrEnum):
    """How a turn's prompt relates to its parent's tokens.

    `exact`: the parent's whole path is reused and only the new suffix was tokenised. `retemplated`: the chat
    template changed the past. `edited`: the client changed the past. `new`: there is no parent.
    """

    EXACT = "exact"
    RETEMPLATED = "retemplated"
    EDITED = "edited"
    NEW = "new"


class LogprobConvention(StrEnum):
    """The distribution that the recorded log-probabilities belong to.

    `sampled`: the temperature-scaled distribution that was sampled from, the policy's own. `adjusted`: the one that
    was sampled from, which penalties or a logit bias had made another than the policy's. `constrained`: of the tokens
    that a constraint left alone, renormalised over them; the policy's own log-probability is lower, by the logarithm
    of what it gave to them all, and the engine does not say how much. `untruncated`: the one before top-p, top-k or
    min-p cut it; the tokens were drawn from what was left, and the engine does not say how much that was.
    """

    SAMPLED = "sampled"
    ADJUSTED = "adjusted"
    CONSTRAINED = "constrained"
    UNTRUNCATED = "untruncated"


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Output tokens `[start, end)` were produced by policy version `version`."""

    version: int
    start: int
    end: int


class ConstraintKind(StrEnum):
    """The languages in which a constraint can be written; the words are SGLang's."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must match: a token that would break it is never drawn. `text` is the schema, the pattern, the
    grammar, or the structural tag as JSON."""

    kind: ConstraintKind
    text: str


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of a turn were drawn. `top_k` -1 means no cut; `temperature` 0 means greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[str, float] | None = None
    constraint: Constraint | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def logprob_convention(self) -> LogprobConvention:
        """Where several apply, the one that a trainer can correct for least."""
        if self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0:
            return LogprobConvention.UNTRUNCATED
        if self.constraint is not None:
            return LogprobConvention.CONSTRAINED
        adjusted = self.presence_penalty or self.frequency_penalty or self.logit_bias
        return LogprobConvention.ADJUSTED if adjusted else LogprobConvention.SAMPLED


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded call.

    The full prompt is the first `prefix_tokens` ids of the parent's path (its prompt and output) followed by
    `prompt_ids`; nothing is stored twice along a path. `output_ids` and `output_logprobs` have equal length, and
    `spans` cover exactly that length in order. `masked` are [start, end) over `prompt_ids` followed by `output_ids`:
    what was there was redacted, and placeholders stand in its place.
    """

    id: TurnId
    session_id: SessionId
    parent_id: TurnId | None
    prefix_tokens: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    sampling: SamplingParameters
    finish_reason: FinishReason
    continuation: Continuation
    state: TurnState
    started_at: float
    first_token_at: float | None
    finished_at: float
    masked: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for start, stop in self.masked:
            if not end <= start < stop <= len(self.prompt_ids) + len(self.output_ids):
                raise ValueError(f"turn {self.id}: masked spans {self.masked} do not follow each other within it")
            end = stop
        if len(self.output_ids) != len(self.output_logprobs):
            raise ValueError(
                f"turn {self.id}: {len(self.output_ids)} output ids but {len(self.output_logprobs)} log-probabilities"
            )
        position = 0
        for span in self.spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"turn {self.id}: version spans {self.spans} do not follow each other")
            position = span.end
        if position != len(self.output_ids):
            raise ValueError(f"turn {self.id}: version spans cover {position} of {len(self.output_ids)} output ids")
        if (self.parent_id is None) != (self.continuation is Continuation.NEW):
            raise ValueError(f"turn {self.id}: a turn is `new` exactly when it has no parent")
        if self.parent_id is None and self.prefix_tokens:
            raise ValueError(f"turn {self.id}: {self.prefix_tokens} shared tokens without a parent")


class TurnPlace(NamedTuple):
    """Where a turn stands in its session's token tree. `prompt_tokens` counts the full prompt."""

    id: str
    parent_id: str | None
    prefix_tokens: int
    prompt_tokens: int
    state: TurnState


def abandoned_turns(turns: Iterable[TurnPlace]) -> frozenset[str]:
    """The truncated turns whose answer is in no other turn's prompt.

    A client that times out has seen nothing of the answer, or has thrown it away: nothing in the session was done
    because of it, so no reward of the session is about it. A client that uses what it had read sends it back with its
    next call, and so continues the turn.
    """
    turns = list(turns)
    truncated = {turn.id: turn.prompt_tokens for turn in turns if turn.state is TurnState.TRUNCATED}
    continued = {
        turn.parent_id
        for turn in turns
        if turn.parent_id in truncated and turn.prefix_tokens > truncated[turn.parent_id]
    }
    return frozenset(truncated.keys() - continued)
