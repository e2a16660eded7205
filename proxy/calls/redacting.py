"""Redact turns by the run's rules before they are recorded.

Only the stored turn changes, not what the client or the engine receives. This process continues a conversation from
the real token ids, which it has in memory. From the store alone, the ids up to the first redacted token are reused,
and the rest is rendered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.calls.observer import TurnObserver
from proxy.contract.token_ids import TokenIds
from proxy.contract.turn import SamplingParameters
from proxy.redaction.rules import Rule
from proxy.redaction.text import TextRedactor
from proxy.redaction.tokens import Spans, masked_tokens
from proxy.tokens.detokenizer import TokenDecoder
from proxy.tokens.template import ChatTemplate
from proxy.turns.service import TurnRecord

# The first of these that is a single token replaces redacted tokens.
_PLACEHOLDERS = ("█", "■", "□", "…", "\n")


class TurnRedactor:
    """Redacts records on a thread, because rules may take long."""

    def __init__(
        self,
        rules: Sequence[Rule],
        template: ChatTemplate,
        decoder: TokenDecoder,
        observer: TurnObserver | None = None,
    ) -> None:
        self._text = TextRedactor(rules)
        self._decoder = decoder
        self._placeholder = _placeholder(template)
        self._observer = observer

    async def redacted(self, records: Sequence[TurnRecord]) -> list[TurnRecord]:
        # Not on the workers for large requests: a slow rule of the operator's would hold them all.
        redacted = await asyncio.to_thread(lambda: [self._record(record) for record in records])
        if self._observer is not None:
            tokens = sum(end - start for record in redacted for start, end in record.turn.masked)
            if tokens:
                self._observer.tokens_redacted(tokens)
        return redacted

    def _record(self, record: TurnRecord) -> TurnRecord:
        turn = record.turn
        prompt = record.prompt_ids if record.prompt_ids is not None else TokenIds.of(turn.prompt_ids)
        before = tuple(prompt[: len(prompt) - len(turn.prompt_ids)])
        own = (*turn.prompt_ids, *turn.output_ids)
        ids, masked = masked_tokens(before, own, self._text, self._decoder, self._placeholder)
        count = len(turn.prompt_ids)
        of_output = {position - count for start, end in masked for position in range(start, end) if position >= count}
        # Zero for masked tokens: a real log-probability would help to guess the token.
        logprobs = tuple(
            0.0 if position in of_output else logprob for position, logprob in enumerate(turn.output_logprobs)
        )
        stored = msgspec.structs.replace(
            turn,
            prompt_ids=ids[:count],
            output_ids=ids[count:],
            output_logprobs=logprobs,
            sampling=self._sampling(turn.sampling),
            masked=masked,
        )
        return msgspec.structs.replace(
            record,
            turn=stored,
            path_ids=prompt + TokenIds.of(turn.output_ids),
            messages=self._text.value(record.messages),
            request=self._text.value(record.request),
            response=self._response(record.response, masked),
        )

    def _sampling(self, sampling: SamplingParameters) -> SamplingParameters:
        constraint = sampling.constraint
        if constraint is not None:
            constraint = msgspec.structs.replace(constraint, text=self._text.value(constraint.text))
        stop = tuple(map(self._text.text, sampling.stop))
        return msgspec.structs.replace(sampling, stop=stop, constraint=constraint)

    def _response(self, response: dict[str, Any], masked: Spans) -> dict[str, Any]:
        """Return the response redacted. Log-probabilities spell the answer, so they stay only if no token was
        redacted."""
        choices = [self._choice(choice, masked) for choice in response.get("choices") or ()]
        return {**response, "choices": choices} if choices else response

    def _choice(self, choice: dict[str, Any], masked: Spans) -> dict[str, Any]:
        changed = {
            key: self._text.value(value) if key in ("text", "reasoning", "tool_calls", "stopped_by") else value
            for key, value in choice.items()
        }
        if masked:
            changed.pop("logprobs", None)
        return changed


def _placeholder(template: ChatTemplate) -> int:
    encoded = [template.encode(text) for text in _PLACEHOLDERS]
    return next((ids[0] for ids in encoded if len(ids) == 1), encoded[-1][0])
