"""Collect one answer: the engine's token ids unchanged, and the text, reasoning and tool calls that they spell."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from proxy.calls.call import CallDelta, Delta, ModelCall, ReasoningDelta, TextDelta, TokenLogprob, TopLogprob
from proxy.calls.prompts import PlannedPrompt
from proxy.contract.identifiers import RunId, SessionId, TurnId, part_id
from proxy.contract.policy import parse_weight_label
from proxy.contract.turn import FinishReason, SamplingParameters, Turn, TurnState, VersionSpan
from proxy.engines.protocol import EngineChunk, EngineFinish
from proxy.errors import InvalidEngineReply
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.formats import ToolCall
from proxy.tokens.output import Event, OutputFormat
from proxy.tokens.reasoning import Reasoning
from proxy.tokens.stop_strings import StopTrimmer

# JSON has no infinities; OpenAI writes this for a token of probability zero.
_LOWEST_LOGPROB = -9999.0

# Characters of an engine's label that an error message repeats.
_LONGEST_LABEL = 80


class CallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that is ready to be generated: choice number `choice` of its call.

    `in_reasoning`: the prompt ends inside of a thought. `one_call`: the answer ends with its first tool call.
    `watched`: no stop string ends it there, so the generation is aborted after the call.
    """

    turn_id: TurnId
    session_id: SessionId
    run_id: RunId
    call: ModelCall
    prompt: PlannedPrompt
    sampling: SamplingParameters
    started_at: float
    choice: int = 0
    in_reasoning: bool = False
    one_call: bool = False
    watched: bool = False


class Capture:
    """Collect the engine's chunks of one answer: deltas for the client as they come, the turn in the end."""

    def __init__(self, plan: CallPlan, decoder: TokenDecoder, output: OutputFormat) -> None:
        self.plan = plan
        self._decoder = decoder
        self._output = output
        self._detokenizer = decoder.start()
        self._trimmer = StopTrimmer(plan.call.sampling.stop)
        self._parser = output.start(
            calls_allowed=plan.call.calls_allowed, in_reasoning=plan.in_reasoning, tools=plan.call.tools
        )
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: tuple[VersionSpan, ...] = ()
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._unshown: list[TokenLogprob] = []
        self.token_logprobs: list[TokenLogprob] = []
        self.calls: list[CallDelta] = []
        self.reasoning_tokens = 0
        self.finish: EngineFinish | None = None
        self.failure: str | None = None
        """Why the answer is not whole, and which engine failed; for operators."""
        self.first_token_at: float | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    @property
    def satisfied(self) -> bool:
        """Whether the client has received its whole answer, although the engine may still generate."""
        return self.plan.one_call and bool(self.calls)

    @property
    def stopped_by(self) -> str | None:
        """The client's stop string that ended the answer."""
        return self._trimmer.stopped_by

    @property
    def token_count(self) -> int:
        return len(self._ids)

    def feed(self, chunk: EngineChunk, now: float) -> list[Delta]:
        """Take a chunk and return its deltas for the client.

        Raise InvalidEngineReply if ids and log-probabilities differ in number, and at the last chunk if the tokens
        cannot be attributed to versions of this run. A refused chunk is neither recorded nor shown.
        """
        if len(chunk.output_ids) != len(chunk.logprobs):
            raise InvalidEngineReply(f"{len(chunk.output_ids)} ids came with {len(chunk.logprobs)} log-probabilities")
        # Checked before anything of the chunk is taken: what cannot be attributed must not be recorded or shown.
        spans = self._version_spans(chunk) if chunk.finish is not None else ()
        if chunk.output_ids and self.first_token_at is None:
            self.first_token_at = now
        self._ids += chunk.output_ids
        self._logprobs += chunk.logprobs
        if chunk.finish is not None:
            self.finish, self._spans = chunk.finish, spans
        return self._read(chunk)

    def flush(self) -> list[Delta]:
        """Return the deltas of text that was withheld as the possible beginning of a marker, after the last chunk."""
        text = self._trimmer.feed(self._detokenizer.finish()) + self._trimmer.finish()
        return self._shown([*self._parser.feed(text), *self._parser.finish()])

    def finish_reason(self) -> FinishReason:
        if self.finish is EngineFinish.STOP or self._trimmer.stopped_by is not None or self.satisfied:
            return FinishReason.TOOL_CALLS if self.calls else FinishReason.STOP
        return FinishReason.LENGTH

    def turn(self, state: TurnState, finished_at: float) -> Turn:
        """Return the answer as a turn of the contract."""
        plan, prompt = self.plan, self.plan.prompt.plan
        return Turn(
            id=plan.turn_id,
            session_id=plan.session_id,
            parent_id=prompt.parent_id,
            prefix_tokens=prompt.prefix_tokens,
            prompt_ids=prompt.new_ids,
            output_ids=tuple(self._ids),
            output_logprobs=tuple(self._logprobs),
            spans=self._spans,
            sampling=plan.sampling,
            finish_reason=self.finish_reason(),
            continuation=prompt.continuation,
            state=state,
            started_at=plan.started_at,
            first_token_at=self.first_token_at,
            finished_at=finished_at,
        )

    def turn_without_tokens(self, state: TurnState, finished_at: float) -> Turn:
        """Return the turn of an answer that broke off before the engine reported which versions produced it.

        A token without its version cannot be recorded, so the turn records only that the call was made.
        """
        bare = Capture(self.plan, self._decoder, self._output)
        bare.finish, bare.first_token_at = self.finish, self.first_token_at
        return bare.turn(state, finished_at)

    def _version_spans(self, last: EngineChunk) -> tuple[VersionSpan, ...]:
        spans, position = [], 0
        for span in last.spans:
            known = parse_weight_label(span.label)
            if known is None or known[0] != self.plan.run_id:
                raise InvalidEngineReply(
                    f"it comes from weights labelled {span.label[:_LONGEST_LABEL]!r}, which are no version of this "
                    "run: the turn cannot be attributed"
                )
            if span.start != position or span.end <= span.start:
                raise InvalidEngineReply(f"its version spans do not follow each other at token {position}")
            spans.append(VersionSpan(version=known[1], start=span.start, end=span.end))
            position = span.end
        if position != self.token_count + len(last.output_ids):
            raise InvalidEngineReply(
                f"its version spans cover {position} of {self.token_count + len(last.output_ids)} tokens"
            )
        return tuple(spans)

    def _read(self, chunk: EngineChunk) -> list[Delta]:
        """Return the chunk's deltas. Read token by token while each token must be counted as reasoning or answer."""
        ids, logprobs = chunk.output_ids, self._shown_logprobs(chunk)
        deltas: list[Delta] = []
        read = 0
        while read < len(ids) and (logprobs or self._parser.may_think):
            # Both before and after the token: the markers around reasoning count as reasoning.
            thinking, stopped = self._parser.thinking, self._trimmer.stopped_by is not None
            events = self._parser.feed(self._trimmer.feed(self._detokenizer.feed(ids[read : read + 1])))
            if thinking or self._parser.thinking:
                self.reasoning_tokens += 1
            elif logprobs and not stopped:
                self._unshown += logprobs[read]
            deltas += self._shown(events)
            read += 1
        text = self._trimmer.feed(self._detokenizer.feed(ids[read:]))
        return [*deltas, *self._shown(self._parser.feed(text))]

    def _shown_logprobs(self, chunk: EngineChunk) -> list[list[TokenLogprob]]:
        """Return the log-probabilities to show with each token: none for hidden tokens, [] if none were asked for."""
        if not self.plan.call.logprobs:
            return []
        asked = self.plan.call.top_logprobs
        ranked = chunk.top_logprobs if asked else ((),) * len(chunk.output_ids)
        if len(ranked) != len(chunk.output_ids):
            raise InvalidEngineReply(
                f"{len(chunk.output_ids)} ids came with {len(ranked)} lists of top log-probabilities"
            )
        shown: list[list[TokenLogprob]] = []
        for token, logprob, top in zip(chunk.output_ids, chunk.logprobs, ranked, strict=True):
            if self._decoder.is_hidden(token):
                shown.append([])
                continue
            best = tuple(
                TopLogprob(token=self._decoder.token_bytes(other), logprob=_finite(value))
                for other, value in top[:asked]
            )
            shown.append([TokenLogprob(token=self._decoder.token_bytes(token), logprob=_finite(logprob), top=best)])
        return shown

    def _shown(self, events: Iterable[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if self.satisfied:  # text after the only allowed call is recorded as tokens and not shown
                break
            if isinstance(event, str):
                self._texts.append(event)
                deltas.append(TextDelta(event, tuple(self._unshown), self.plan.choice))
                self.token_logprobs += self._unshown
                self._unshown.clear()
            elif isinstance(event, Reasoning):
                self._thoughts.append(event.text)
                deltas.append(ReasoningDelta(event.text, self.plan.choice))
            else:
                deltas.append(self._called(event))
        return deltas

    def _called(self, call: ToolCall) -> CallDelta:
        # The id names the turn, so that a client that sends it back names its session.
        made = CallDelta(part_id("call", self.plan.turn_id, len(self.calls)), call, self.plan.choice)
        self.calls.append(made)
        self._unshown.clear()
        return made


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB
