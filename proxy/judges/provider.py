"""Answers of judges' models, and the errors of their providers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.jobs.kinds import JobFailure, JobPostponed, JobRefused
from proxy.settings import JudgeSettings, ProviderSettings

# How long to wait after a refusal that names no time, and the longest time that a provider may ask for.
_PAUSE_SECONDS = 30.0
_MOST_PAUSE_SECONDS = 3600.0
# Answers that a repetition cannot change: a wrong key, an unknown model, parameters that the endpoint refuses.
_REFUSALS = (400, 401, 403, 404, 405, 410, 413, 415, 422)


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The text of an answer, and the tokens that the provider counted; 0 if it counts none. `is_cut`: the answer was
    not complete within `max_tokens`. `cost` is None if the price is unknown."""

    text: str
    is_cut: bool = False
    prompt_tokens: int
    completion_tokens: int
    cost: float | None = None


def response_format(form: dict[str, Any]) -> dict[str, Any]:
    """Return the `response_format` that asks for JSON of this schema."""
    return {"type": "json_schema", "json_schema": {"name": "grade", "strict": True, "schema": form}}


def answer_of(completion: Any, provider: ProviderSettings | None) -> ModelAnswer:
    """Return the answer in a chat completion. Raise JobFailure if it is none."""
    try:
        choice = completion["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, TypeError, IndexError) as error:
        raise JobFailure("the judge's provider did not answer with a chat completion") from error
    usage = completion.get("usage") or {}
    prompt_tokens, completion_tokens = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    return ModelAnswer(
        text=text if isinstance(text, str) else "",
        is_cut=choice.get("finish_reason") == "length",
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cost=_cost(provider, prompt_tokens, completion_tokens),
    )


def failure_of(status: int, reason: str, retry_after: str | None, judge: JudgeSettings) -> Exception:
    """Return the error for an answer that is not a success: JobPostponed if the provider asks for a pause, JobRefused
    if a repetition cannot help, JobFailure otherwise."""
    addition = f": {reason}" if reason else ""
    message = f"the provider {judge.provider!r} answered {status} for {judge.provider_model!r}{addition}"
    if status == 429:
        # Also over quota: the job waits, and takes none of its attempts, until somebody raises the quota.
        return JobPostponed(message, seconds=_pause(retry_after))
    if status in _REFUSALS:
        return JobRefused(f"{message}; correct the judge or its provider, then retry the job")
    return JobFailure(message)


def _pause(retry_after: str | None) -> float:
    try:
        seconds = int(retry_after or "")
    except ValueError:  # none, or a date
        return _PAUSE_SECONDS
    return min(max(float(seconds), 1.0), _MOST_PAUSE_SECONDS)


def _cost(provider: ProviderSettings | None, prompt_tokens: int, completion_tokens: int) -> float | None:
    if provider is None or provider.prompt_price is None or provider.completion_price is None:
        return None
    return (prompt_tokens * provider.prompt_price + completion_tokens * provider.completion_price) / 1e6


def _count(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, Mapping) else None
    # Bounded by what the column holds: the number is the provider's.
    return min(max(count, 0), 2**31 - 1) if isinstance(count, int) else 0
