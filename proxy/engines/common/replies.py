"""The answers of `/generate`, in SGLang's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Finish = dict[str, Any]
"""The reason why a generation ended, as `finish_reason` holds it."""

ScoredToken = tuple[float | None, int, None]
"""Log-probability, token id, and SGLang's place for the token's text."""


def stopped(matched: int | str) -> Finish:
    """Return the reason of a generation that ended at a stop token or a stop string."""
    return {"type": "stop", "matched": matched}


def full_length(tokens: int) -> Finish:
    """Return the reason of a generation that reached its bound on new tokens."""
    return {"type": "length", "length": tokens}


def aborted(message: str, status: int | None = None) -> Finish:
    """Return the reason of an aborted generation; with a `status`, clients read it as a refusal of the request."""
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}


class WeightSpans:
    """Labels of the weights that produced the tokens of one generation, in order and without gaps."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, int, int]] = []

    def extend(self, label: str, end: int) -> None:
        """Record that the weights labelled `label` produced the tokens up to `end`."""
        before, start, last_end = self._spans[-1] if self._spans else (label, 0, 0)
        if before == label:
            self._spans[-1:] = [(label, start, end)]
        else:
            self._spans.append((label, last_end, end))

    def to_wire(self) -> list[dict[str, Any]]:
        """Return the spans as `weight_versions` holds them."""
        return [{"version": label, "start": start, "end": end} for label, start, end in self._spans]


def chunk(
    *,
    rid: str,
    prompt_tokens: int,
    completion_tokens: int,
    weight_version: str,
    output_ids: Sequence[int],
    logprobs: Sequence[ScoredToken] | None,
    tops: Sequence[Sequence[ScoredToken]] | None,
    input_logprobs: Sequence[ScoredToken] | None = None,
) -> dict[str, Any]:
    """Return an answer, or a chunk of one, before its end: `output_ids` are the new tokens, `completion_tokens`
    counts all so far. `input_logprobs` belong to the first chunk."""
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": None,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "weight_version": weight_version,
    }
    if logprobs is not None:
        meta["output_token_logprobs"] = logprobs
    if tops is not None:
        meta["output_top_logprobs"] = tops
    if input_logprobs is not None:
        meta["input_token_logprobs"] = input_logprobs
    return {"output_ids": output_ids, "meta_info": meta}


def last_chunk(content: dict[str, Any], *, finish: Finish, spans: WeightSpans, retractions: int) -> dict[str, Any]:
    """Return a chunk with the end of its generation added."""
    content["meta_info"] |= {
        "finish_reason": finish,
        "weight_versions": spans.to_wire(),
        "num_retractions": retractions,
    }
    return content
