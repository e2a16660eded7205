"""Parts of answers that OpenAI's dialects write alike."""

from __future__ import annotations

from typing import Any

from proxy.calls.call import Answer, Choice


def own_turn(answer: Answer, choice: Choice) -> dict[str, Any]:
    """Return the `turn_id` field of a choice, which clients need to reward one choice of several.

    A single choice needs none: the answer's own id is its turn's.
    """
    return {"turn_id": choice.turn_id} if len(answer.choices) > 1 else {}


def completion_usage(answer: Answer) -> dict[str, Any]:
    """Return the `usage` object of chat completions and completions."""
    usage: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
    if answer.reasoning_tokens:
        usage["completion_tokens_details"] = {"reasoning_tokens": answer.reasoning_tokens}
    return usage


def token_logprob(token: bytes, logprob: float) -> dict[str, Any]:
    """Return one token with its log-probability. `bytes` is exact; `token` is not where a character is split."""
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}
