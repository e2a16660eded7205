"""Limits on what an honest engine can answer to one request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from proxy.errors import InvalidEngineReply

HIGHEST_LOGPROB = 1e-3
"""A probability cannot exceed 1. Engines that compute in 16 bits exceed it by rounding: up to here a positive
log-probability is recorded as 0, beyond it the reply is refused."""

LOWEST_LOGPROB = -1000.0
"""Drawing in float32 never picks a token below about -104. The rest is room for engines that report the distribution
before temperature or bias; far beyond it lie the numbers by which masks and broken weights show."""

_ANY_ID = 1 << 31
"""Token ids are stored as signed 32-bit integers."""

_EVENT_BYTES = 1 << 20
_BYTES_PER_TOKEN = 1 << 10
"""The longest tokens in use have 128 characters, six bytes each where JSON escapes them."""


class ReplyBounds(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked, as far as it bounds the reply. `vocabulary_size` is the model's own, padding included;
    `prompt_tokens` None: not compared; `per_token` is how many tokens are reported for each one generated."""

    max_new_tokens: int = _ANY_ID
    vocabulary_size: int = _ANY_ID
    prompt_tokens: int | None = None
    per_token: int = 1

    @property
    def max_bytes(self) -> int:
        """The longest body, or event of a stream, that can be an answer."""
        return _EVENT_BYTES + self.max_new_tokens * self.per_token * _BYTES_PER_TOKEN

    def check_counts(self, completion_tokens: int, prompt_tokens: int | None) -> None:
        """Raise InvalidEngineReply for more tokens than asked for, or for another prompt than was sent."""
        if completion_tokens > self.max_new_tokens:
            raise InvalidEngineReply(
                f"{completion_tokens} tokens came, and at most {self.max_new_tokens} were asked for"
            )
        if prompt_tokens is not None and self.prompt_tokens not in (None, prompt_tokens):
            raise InvalidEngineReply(
                f"it counts {prompt_tokens} tokens in the prompt, and {self.prompt_tokens} were sent"
            )

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise InvalidEngineReply for an id outside of the model's vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocabulary_size):
            wrong = next(token for token in ids if not 0 <= token < self.vocabulary_size)
            raise InvalidEngineReply(f"token id {wrong} is not in the model's vocabulary of {self.vocabulary_size}")


def checked_logprobs(values: Sequence[float | None]) -> tuple[float, ...]:
    """The log-probabilities of sampled tokens, rounding errors above 0 taken away.

    Raises InvalidEngineReply for a missing one, and for one that no sampled token can have.
    """
    return tuple([_checked_logprob(value) for value in values])


def _checked_logprob(value: float | None) -> float:
    if value is None:
        raise InvalidEngineReply("a token came without its log-probability")
    if not LOWEST_LOGPROB <= value <= HIGHEST_LOGPROB:  # so that NaN is refused too
        raise InvalidEngineReply(f"{value!r} is not the log-probability of a token that was sampled")
    return min(value, 0.0)
