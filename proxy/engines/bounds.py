"""Limits on the answer of an honest engine to one request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from proxy.errors import InvalidEngineReply

HIGHEST_LOGPROB = 1e-3
"""Largest log-probability that counts as a rounding error and is recorded as 0; a larger one is refused. Engines that
compute in 16 bits report probabilities slightly above 1."""

LOWEST_LOGPROB = -1000.0
"""Smallest log-probability that is accepted. Sampling in float32 never draws a token below about -104; the rest
leaves room for engines that report the distribution before temperature or bias. Masks and broken weights give numbers
far beyond."""

# Token ids are stored as signed 32-bit integers.
_ANY_ID = 1 << 31

# Allowance for everything in an answer that does not grow with its tokens.
_EVENT_BYTES = 1 << 20
# Most bytes of one token: the longest ones in use have 128 characters, each up to six bytes when JSON escapes it.
_BYTES_PER_TOKEN = 1 << 10


class ReplyBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a request that limit its reply. `vocabulary_size` is the model's own, padding included. With
    `prompt_tokens` None the length of the prompt is not compared. `per_token` is the number of tokens reported for
    each generated one."""

    max_new_tokens: int = _ANY_ID
    vocabulary_size: int = _ANY_ID
    prompt_tokens: int | None = None
    per_token: int = 1

    @property
    def max_bytes(self) -> int:
        """The largest possible size of a body, or of one event of a stream."""
        return _EVENT_BYTES + self.max_new_tokens * self.per_token * _BYTES_PER_TOKEN

    def check_counts(self, completion_tokens: int, prompt_tokens: int | None) -> None:
        """Raise InvalidEngineReply for more tokens than requested, or for a prompt of another length."""
        if completion_tokens > self.max_new_tokens:
            raise InvalidEngineReply(
                f"{completion_tokens} tokens came, and at most {self.max_new_tokens} were requested"
            )
        if prompt_tokens is not None and self.prompt_tokens not in (None, prompt_tokens):
            raise InvalidEngineReply(
                f"it counts {prompt_tokens} tokens in the prompt, and {self.prompt_tokens} were sent"
            )

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise InvalidEngineReply for an id outside the model's vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocabulary_size):
            wrong = next(token for token in ids if not 0 <= token < self.vocabulary_size)
            raise InvalidEngineReply(f"token id {wrong} is not in the model's vocabulary of {self.vocabulary_size}")


def checked_logprobs(values: Sequence[float | None]) -> tuple[float, ...]:
    """Return the log-probabilities of sampled tokens, with rounding errors above 0 set to 0.

    Raise InvalidEngineReply if one is missing, or is a number that no sampled token can have.
    """
    possible = [value for value in values if value is not None and LOWEST_LOGPROB <= value <= HIGHEST_LOGPROB]
    if len(possible) == len(values):
        return tuple([value if value < 0.0 else 0.0 for value in possible])
    if None in values:
        raise InvalidEngineReply("a token came without its log-probability")
    wrong = next(value for value in values if not LOWEST_LOGPROB <= (value or 0.0) <= HIGHEST_LOGPROB)  # NaN too
    raise InvalidEngineReply(f"{wrong!r} is not the log-probability of a token that was sampled")
