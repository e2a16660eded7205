"""Parts of answers that OpenAI's dialects write alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.calls.call import Answer, ModelCall, StreamHead, marks
from proxy.dialects.events import DONE, PING, event


def completion_usage(answer: Answer) -> dict[str, Any]:
    """Return the `usage` object of chat completions and completions."""
    completion, reasoning = answer.completion_tokens, answer.reasoning_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": answer.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
    if reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage


def token_logprob(token: bytes, logprob: float) -> dict[str, Any]:
    """Return one token with its log-probability. `bytes` is exact; `token` is not where a character is split."""
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}


def completion(kind: str, answer: Answer, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the body of an answer whose `object` is `kind`, with one entry of `choices` per choice."""
    return {
        "id": answer.turn_id,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "system_fingerprint": answer.fingerprint,
        "choices": _with_turn_ids(answer, choices),
        "usage": completion_usage(answer),
        **marks(answer.unrecorded),
    }


def _with_turn_ids(answer: Answer, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `turn_id` to each of several choices, which clients need to reward one of them.

    A single choice needs none: the answer's own id is its turn's.
    """
    if len(choices) == 1:
        return choices
    return [{**written, "turn_id": choice.turn_id} for written, choice in zip(choices, answer.choices, strict=True)]


class CompletionStream:
    """The common part of the two dialects' streams: a head that every event repeats, and the end of the stream."""

    kind: ClassVar[str]
    """The `object` of each event."""

    def __init__(self, call: ModelCall, head: StreamHead) -> None:
        self._call = call
        self._head = head

    def ping(self) -> bytes:
        return PING

    def failure(self, envelope: Mapping[str, Any]) -> bytes:
        return event(envelope)

    def _event(
        self,
        choices: list[dict[str, Any]],
        *,
        fingerprint: str | None = None,
        unrecorded: str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        head = self._head
        chunk = {
            "id": head.turn_id,
            "object": self.kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": fingerprint,
            "choices": choices,
            **marks(unrecorded),
        }
        if self._call.include_usage:
            chunk["usage"] = usage  # OpenAI's API sends a null in each chunk before the one with the usage
        return event(chunk)

    def _ending(self, answer: Answer, choices: list[dict[str, Any]]) -> bytes:
        """Return the last event of each choice, the one with the usage if the call asks for it, and the end."""
        last = b"".join(
            self._event([choice], fingerprint=answer.fingerprint, unrecorded=answer.unrecorded)
            for choice in _with_turn_ids(answer, choices)
        )
        if self._call.include_usage:
            last += self._event([], fingerprint=answer.fingerprint, usage=completion_usage(answer))
        return last + DONE
