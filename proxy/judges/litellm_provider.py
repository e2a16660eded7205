"""Calls of judges' models through litellm, which knows the APIs of many providers.

litellm is imported at the first use, on a thread: it takes seconds and some hundred megabytes, which a process
without such a judge must not pay. Nothing on the way of agents' calls imports it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping
from typing import Any

from proxy.contract.extras import missing_packages
from proxy.jobs.kinds import JobFailure, JobRefused
from proxy.judges.provider import ModelAnswer, answer_of, failure_of
from proxy.settings import JudgeSettings, ProviderSettings

_MOST_REASON = 300


class LitellmProvider:
    """A provider of litellm's, by litellm's name for it. Its key is the configuration's, or none: variables of the
    environment that litellm reads itself are the operator's."""

    def __init__(self, name: str, settings: ProviderSettings) -> None:
        self._name = name
        self._settings = settings
        self._library: Any = None

    async def aclose(self) -> None:
        """Nothing to close: litellm's clients end with the process."""

    async def complete(self, judge: JudgeSettings, body: Mapping[str, Any]) -> ModelAnswer:
        """Return the answer; the caller bounds its time. Raise the errors of `failure_of`, JobRefused if litellm is
        not installed or does not know the provider, and JobFailure if the provider cannot be reached."""
        library = await self._loaded()
        key = self._settings.api_key
        options: dict[str, Any] = {
            **body,
            "model": f"{self._name}/{judge.provider_model}",
            # The job is what repeats: with retries of litellm's own, a failing provider would be asked 24 times.
            "num_retries": 0,
            "max_retries": 0,
            "timeout": judge.timeout_seconds,
        }
        if key is not None:
            options["api_key"] = key.get_secret_value()
        if self._settings.api_base is not None:
            options["api_base"] = self._settings.api_base
        try:
            response = await library.acompletion(**options)
        except Exception as error:  # litellm raises its own classes, those of openai, and plain ones
            raise self._failure(error, judge) from error
        answer = answer_of(response.model_dump(), self._settings)
        if answer.cost is not None:
            return answer
        return ModelAnswer(
            text=answer.text,
            is_cut=answer.is_cut,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cost=_known_cost(library, response, options["model"]),
        )

    async def _loaded(self) -> Any:
        if self._library is None:
            if reason := missing_packages("litellm"):
                raise JobRefused(reason)
            self._library = await asyncio.to_thread(_load)
        return self._library

    def _failure(self, error: Exception, judge: JudgeSettings) -> Exception:
        status = getattr(error, "status_code", None)
        reason = _without_key(str(error), self._settings)[:_MOST_REASON]
        response = getattr(error, "response", None)
        # litellm gives failures without an answer, such as a refused connection, the status 500.
        if not isinstance(status, int):
            return JobFailure(f"the judge's provider {self._name!r} failed: {reason or type(error).__name__}")
        retry_after = response.headers.get("retry-after") if response is not None else None
        return failure_of(status, reason, retry_after, judge)


def _load() -> Any:
    """Import litellm without its network access at import, its telemetry and its messages."""
    # Read at import: the price table shipped with the package, instead of one from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    # By its name, so that type checkers do not read all of it.
    litellm: Any = importlib.import_module("litellm")
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    # Parameters that a provider does not have, such as `response_format`: the answer is read from the text then.
    litellm.drop_params = True
    litellm.num_retries = 0
    # The first call imports most of the library; without this one, it would stop the event loop for seconds.
    litellm.completion(model="openai/none", messages=[{"role": "user", "content": ""}], mock_response="ready")
    return litellm


def _known_cost(library: Any, response: Any, model: str) -> float | None:
    try:
        return float(library.completion_cost(completion_response=response, model=model))
    except Exception:  # noqa: BLE001  (litellm raises plain Exception for a model without a price)
        return None


def _without_key(text: str, settings: ProviderSettings) -> str:
    key = settings.api_key.get_secret_value() if settings.api_key is not None else ""
    return text.replace(key, "…") if key else text
