"""One answer as it is recorded and shown: the engine's ids kept as they came, text and tool calls derived."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable

import msgspec

from proxy.chat.call import CallDelta, Delta, ModelCall, TextDelta, TokenLogprob, TopLogprob
from proxy.chat.prompts import PlannedPrompt
from proxy.contract.identifiers import RunId, SessionId, TurnId
from proxy.contract.policy import parse_weight_label
from proxy.contract.turn import FinishReason, SamplingParameters, Turn, TurnState, VersionSpan
from proxy.engines.interface import EngineChunk, EngineFinish, LabelSpan
from proxy.errors import EngineFailed
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.stop_strings import StopTrimmer
from proxy.tokens.tool_calls import Event, ToolCall, ToolCallParser

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinities; OpenAI writes this for a token of no probability."""


class CallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is ready to be generated: the one of number `choice` to its call."""

    turn_id: TurnId
    session_id: SessionId
    run_id: RunId
    call: ModelCall
    prompt: PlannedPrompt
    sampling: SamplingParameters
    started_at: float
    choice: int = 0


class Capture:
    """Takes the engine's chunks in order, gives what the client is shown of them, and in the end the turn."""

    def __init__(self, plan: CallPlan, decoder: TokenDecoder) -> None:
        self.plan = plan
        self._decoder = decoder
        self._detokenizer = decoder.start()
        self._trimmer = StopTrimmer(plan.call.sampling.stop)
        self._parser = ToolCallParser() if plan.call.calls_allowed else None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: tuple[LabelSpan, ...] = ()
        self._texts: list[str] = []
        self._unshown: list[TokenLogprob] = []
        self.token_logprobs: list[TokenLogprob] = []
        self.calls: list[CallDelta] = []
        self.finish: EngineFinish | None = None
        self.first_token_at: float | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def stopped_by(self) -> str | None:
        """The client's stop string that ended it."""
        return self._trimmer.stopped_by

    @property
    def token_count(self) -> int:
        return len(self._ids)

    def feed(self, chunk: EngineChunk, now: float) -> list[Delta]:
        """Raises EngineFailed when ids and log-probabilities do not belong together."""
        if len(chunk.output_ids) != len(chunk.logprobs):
            raise EngineFailed(f"{len(chunk.output_ids)} ids came with {len(chunk.logprobs)} log-probabilities")
        if chunk.output_ids and self.first_token_at is None:
            self.first_token_at = now
        self._ids += chunk.output_ids
        self._logprobs += chunk.logprobs
        if self.plan.call.logprobs and not self._trimmer.stopped:
            self._note_logprobs(chunk)
        if chunk.finish is not None:
            self.finish, self._spans = chunk.finish, chunk.spans
        return self._shown(self._parse(self._trimmer.feed(self._detokenizer.feed(chunk.output_ids))))

    def flush(self) -> list[Delta]:
        """What was held back, once no more tokens come."""
        text = self._trimmer.feed(self._detokenizer.finish()) + self._trimmer.finish()
        events = self._parse(text)
        if self._parser is not None:
            events = [*events, *self._parser.finish()]
        return self._shown(events)

    def finish_reason(self) -> FinishReason:
        if self.finish is EngineFinish.STOP or self._trimmer.stopped:
            return FinishReason.TOOL_CALLS if self.calls else FinishReason.STOP
        return FinishReason.LENGTH

    def turn(self, state: TurnState, finished_at: float) -> Turn:
        """The contract's turn. Raises EngineFailed when its tokens cannot be attributed to versions of this run."""
        plan, prompt = self.plan, self.plan.prompt.plan
        spans = self._version_spans()
        try:
            return Turn(
                id=plan.turn_id,
                session_id=plan.session_id,
                parent_id=prompt.parent_id,
                prefix_tokens=prompt.prefix_tokens,
                prompt_ids=prompt.new_ids,
                output_ids=tuple(self._ids),
                output_logprobs=tuple(self._logprobs),
                spans=spans,
                sampling=plan.sampling,
                finish_reason=self.finish_reason(),
                continuation=prompt.continuation,
                state=state,
                started_at=plan.started_at,
                first_token_at=self.first_token_at,
                finished_at=finished_at,
            )
        except ValueError as error:
            raise EngineFailed(f"the engine's version spans do not fit its tokens: {error}") from error

    def turn_without_tokens(self, state: TurnState, finished_at: float) -> Turn:
        """For an answer that was cut before the engine said which versions produced it: an id without its version
        cannot be recorded, so only that the call was made is."""
        bare = Capture(self.plan, self._decoder)
        bare.finish, bare.first_token_at = self.finish, self.first_token_at
        return bare.turn(state, finished_at)

    def _version_spans(self) -> tuple[VersionSpan, ...]:
        spans = []
        for span in self._spans:
            known = parse_weight_label(span.label)
            if known is None or known[0] != self.plan.run_id:
                raise EngineFailed(
                    f"the engine answered with weights labelled {span.label!r}, which are no version of this run: "
                    "the turn cannot be attributed"
                )
            spans.append(VersionSpan(version=known[1], start=span.start, end=span.end))
        return tuple(spans)

    def _parse(self, text: str) -> list[Event]:
        if self._parser is not None:
            return self._parser.feed(text) if text else []
        return [text] if text else []

    def _note_logprobs(self, chunk: EngineChunk) -> None:
        asked = self.plan.call.top_logprobs
        ranked = chunk.top_logprobs if asked else ((),) * len(chunk.output_ids)
        if len(ranked) != len(chunk.output_ids):
            raise EngineFailed(f"{len(chunk.output_ids)} ids came with {len(ranked)} lists of top log-probabilities")
        for token, logprob, top in zip(chunk.output_ids, chunk.logprobs, ranked, strict=True):
            if not self._decoder.is_hidden(token):
                best = tuple(
                    TopLogprob(token=self._decoder.token_bytes(other), logprob=_finite(value))
                    for other, value in top[:asked]
                )
                shown = TokenLogprob(token=self._decoder.token_bytes(token), logprob=_finite(logprob), top=best)
                self._unshown.append(shown)

    def _shown(self, events: Iterable[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if isinstance(event, ToolCall):
                call = CallDelta(f"call_{secrets.token_hex(12)}", event, self.plan.choice)
                self.calls.append(call)
                deltas.append(call)
                continue
            self._texts.append(event)
            deltas.append(TextDelta(event, tuple(self._unshown), self.plan.choice))
            self.token_logprobs += self._unshown
            self._unshown.clear()
        return deltas


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB
