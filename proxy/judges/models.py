"""Calls of judges' models at OpenAI-compatible endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from proxy.jobs.kinds import JobFailure, JobPostponed, JobRefused
from proxy.judges.answers import schema
from proxy.settings import JudgeSettings, ProviderSettings

# An answer has kilobytes. A larger one is not read: it would take memory from the model calls of agents.
_MOST_BYTES = 1 << 20
# How long to wait after a refusal that names no time, and the longest time that a provider may ask for.
_PAUSE_SECONDS = 30.0
_MOST_PAUSE_SECONDS = 3600.0
# Answers that a repetition cannot change: a wrong key, an unknown model, parameters that the endpoint refuses.
_REFUSALS = (400, 401, 403, 404, 405, 410, 413, 415, 422)
_MOST_REASON = 300


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The text of an answer, and the tokens that the provider counted; 0 if it counts none. `is_cut`: the answer was
    not complete within `max_tokens`."""

    text: str
    is_cut: bool = False
    prompt_tokens: int
    completion_tokens: int


class JudgeModels:
    """Asks the models of the configured providers."""

    def __init__(self, providers: Mapping[str, ProviderSettings]) -> None:
        self._providers = providers
        self._clients: dict[str, httpx.AsyncClient] = {}

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def provider(self, judge: JudgeSettings) -> ProviderSettings:
        """Return the judge's provider. Raise JobRefused if the configuration has none of this name."""
        found = self._providers.get(judge.provider)
        if found is None:
            known = ", ".join(sorted(self._providers)) or "none"
            raise JobRefused(
                f"the judge's model {judge.model!r} names the provider {judge.provider!r}, which is not configured "
                f"(configured: {known}): add [providers.{judge.provider}] with its base_url"
            )
        return found

    async def ask(self, judge: JudgeSettings, messages: Sequence[Mapping[str, Any]]) -> ModelAnswer:
        """Return one answer. Raise JobRefused if the provider refuses the request for good, JobPostponed if it asks
        for a pause, JobFailure if it cannot be reached, fails, is too slow or does not answer as a model."""
        provider = self.provider(judge)
        body: dict[str, Any] = {
            "model": judge.provider_model,
            "messages": list(messages),
            "max_tokens": judge.max_tokens,
        }
        if judge.temperature is not None:
            body["temperature"] = judge.temperature
        if provider.structured:
            body["response_format"] = schema()
        try:
            # httpx bounds each read; a server that sends a byte now and then would pass those bounds for ever.
            async with asyncio.timeout(judge.timeout_seconds):
                status, headers, content = await self._post(judge.provider, provider, body)
        except TimeoutError as error:
            raise JobFailure(f"the judge's model did not answer within {judge.timeout_seconds:g} seconds") from error
        except httpx.HTTPError as error:
            raise JobFailure(f"the judge's provider cannot be reached: {error or type(error).__name__}") from error
        _raise_for(status, headers, content, judge)
        return _answer(content)

    async def _post(
        self, name: str, provider: ProviderSettings, body: Mapping[str, Any]
    ) -> tuple[int, httpx.Headers, bytes]:
        client = self._clients.get(name)
        if client is None:
            # One client a provider, made at the first use: a new TLS context takes tens of milliseconds. The time for
            # the whole answer is bounded by the caller.
            client = self._clients[name] = httpx.AsyncClient(timeout=None)  # noqa: S113
        headers = {}
        if provider.api_key is not None:
            headers["authorization"] = f"Bearer {provider.api_key.get_secret_value()}"
        url = provider.base_url.rstrip("/") + "/chat/completions"
        content = b""
        async with client.stream("POST", url, json=body, headers=headers) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > _MOST_BYTES:
                    raise JobFailure(f"the judge's answer has more than {_MOST_BYTES >> 20} MiB")
        return response.status_code, response.headers, content


def cost_of(provider: ProviderSettings, *, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Return the cost of the tokens; None if the provider has no prices."""
    if provider.prompt_price is None or provider.completion_price is None:
        return None
    return (prompt_tokens * provider.prompt_price + completion_tokens * provider.completion_price) / 1e6


def _raise_for(status: int, headers: httpx.Headers, content: bytes, judge: JudgeSettings) -> None:
    """Raise the error of an answer that is not a success."""
    if 200 <= status < 300:
        return
    message = f"the provider {judge.provider!r} answered {status} for {judge.provider_model!r}{_reason(content)}"
    if status == 429:
        # Also over quota: the job waits, and takes none of its attempts, until somebody raises the quota.
        raise JobPostponed(message, seconds=_pause(headers))
    if status in _REFUSALS:
        raise JobRefused(f"{message}; correct the judge or its provider, then retry the job")
    raise JobFailure(message)


def _reason(content: bytes) -> str:
    """Return the provider's own error message, as an addition to ours."""
    try:
        message = msgspec.json.decode(content)["error"]["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError):
        return ""
    return f": {message[:_MOST_REASON]}" if isinstance(message, str) else ""


def _pause(headers: httpx.Headers) -> float:
    try:
        seconds = int(headers.get("retry-after", ""))
    except ValueError:  # none, or a date
        return _PAUSE_SECONDS
    return min(max(float(seconds), 1.0), _MOST_PAUSE_SECONDS)


def _answer(content: bytes) -> ModelAnswer:
    try:
        body = msgspec.json.decode(content)
        choice = body["choices"][0]
        text = choice["message"]["content"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError) as error:
        raise JobFailure("the judge's provider did not answer with a chat completion") from error
    usage = body.get("usage") or {}
    return ModelAnswer(
        text=text if isinstance(text, str) else "",
        is_cut=choice.get("finish_reason") == "length",
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
    )


def _count(usage: Any, name: str) -> int:
    count = usage.get(name) if isinstance(usage, Mapping) else None
    # Bounded by what the column holds: the number is the provider's.
    return min(max(count, 0), 2**31 - 1) if isinstance(count, int) else 0
