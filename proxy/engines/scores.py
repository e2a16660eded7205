"""Ask an engine for the log-probabilities of given tokens: the request, and the check of its reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.engines.bounds import checked_logprobs
from proxy.errors import InvalidEngineReply


class _Meta(msgspec.Struct, frozen=True):
    input_token_logprobs: list[tuple[float | None, int, Any]]


class _Reply(msgspec.Struct, frozen=True):
    meta_info: _Meta


def score_body(ids: Sequence[int], adapter: str | None, *, prefix_key: str) -> bytes:
    """Return the body of a `/generate` request that scores `ids`. It generates one token, as SGLang requires."""
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": prefix_key,
    }
    if adapter is not None:
        body["lora_path"] = adapter
    return msgspec.json.encode(body)


def read_scores(content: bytes, ids: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability of each id after the first. Raises InvalidEngineReply."""
    try:
        scored = msgspec.json.decode(content, type=_Reply).meta_info.input_token_logprobs
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidEngineReply(f"its scores cannot be read: {error}") from error
    if [token for _, token, _ in scored] != list(ids):
        raise InvalidEngineReply("its scores belong to other tokens than those that were sent")
    return checked_logprobs([logprob for logprob, _, _ in scored[1:]])
