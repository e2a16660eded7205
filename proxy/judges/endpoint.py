"""Calls of judges' models at OpenAI-compatible endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from proxy.jobs.kinds import JobFailure
from proxy.judges.provider import ModelAnswer, answer_of, failure_of
from proxy.settings import JudgeSettings, ProviderSettings

# An answer has kilobytes. A larger one is not read: it would take memory from the model calls of agents.
_MOST_BYTES = 1 << 20
_MOST_REASON = 300


class Endpoint:
    """A provider with a `base_url`."""

    def __init__(self, settings: ProviderSettings) -> None:
        self._settings = settings
        self._client: httpx.AsyncClient | None = None

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def complete(self, judge: JudgeSettings, body: Mapping[str, Any]) -> ModelAnswer:
        """Return the answer to a request for a chat completion; the caller bounds its time. Raise the errors of
        `failure_of`, and JobFailure if the endpoint cannot be reached or does not answer as a model."""
        try:
            status, headers, content = await self._post(body)
        except httpx.HTTPError as error:
            raise JobFailure(f"the judge's provider cannot be reached: {error or type(error).__name__}") from error
        if not 200 <= status < 300:
            raise failure_of(status, _reason(content), headers.get("retry-after"), judge)
        try:
            completion = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JobFailure("the judge's provider did not answer with a chat completion") from error
        return answer_of(completion, self._settings)

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, httpx.Headers, bytes]:
        if self._client is None:
            # Made at the first use: a new TLS context takes tens of milliseconds. The time for the whole answer is
            # bounded by the caller.
            self._client = httpx.AsyncClient(timeout=None)  # noqa: S113
        headers = {}
        if self._settings.api_key is not None:
            headers["authorization"] = f"Bearer {self._settings.api_key.get_secret_value()}"
        url = (self._settings.base_url or "").rstrip("/") + "/chat/completions"
        content = b""
        async with self._client.stream("POST", url, json=body, headers=headers) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > _MOST_BYTES:
                    raise JobFailure(f"the judge's answer has more than {_MOST_BYTES >> 20} MiB")
        return response.status_code, response.headers, content


def _reason(content: bytes) -> str:
    """Return the provider's own error message."""
    try:
        message = msgspec.json.decode(content)["error"]["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError):
        return ""
    return message[:_MOST_REASON] if isinstance(message, str) else ""
