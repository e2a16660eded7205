"""The models of judges: at endpoints, at litellm's providers, and runs that this installation serves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from proxy.jobs.kinds import JobFailure, JobRefused
from proxy.judges.endpoint import Endpoint
from proxy.judges.litellm_provider import LitellmProvider
from proxy.judges.provider import ModelAnswer, response_format
from proxy.judges.subjects import Subject
from proxy.settings import JudgeSettings, ProviderSettings


class Provider(Protocol):
    """Answers requests for chat completions."""

    async def complete(self, judge: JudgeSettings, body: Mapping[str, Any]) -> ModelAnswer: ...

    async def aclose(self) -> None: ...


class RunModels(Protocol):
    """Answers with runs that this process's engines serve (`proxy.calls.judging`)."""

    async def ask(self, subject: Subject, messages: Sequence[Mapping[str, Any]], form: dict[str, Any]) -> ModelAnswer:
        """Return one answer of the run that the subject's judge names, like `JudgeModels.ask`."""
        ...


class JudgeModels:
    """Asks the models of the configured providers, and runs."""

    def __init__(self, providers: Mapping[str, ProviderSettings], runs: RunModels | None = None) -> None:
        """`runs` is None in a process without engines, which refuses judges that ask runs."""
        self._runs = runs
        self._settings = providers
        self._providers: dict[str, Provider] = {
            name: Endpoint(settings) if settings.base_url is not None else LitellmProvider(name, settings)
            for name, settings in providers.items()
        }

    async def aclose(self) -> None:
        for provider in self._providers.values():
            await provider.aclose()

    def check(self, judge: JudgeSettings) -> None:
        """Raise JobRefused if the configuration lacks the judge's provider, or this process the engines of runs."""
        if judge.run_model is not None:
            if self._runs is None:
                raise JobRefused(
                    f"the judge asks a run ({judge.model}), and `base-rl worker` has no engines: leave out [jobs] "
                    "broker, so that the proxies judge, or ask a provider; then retry the job"
                )
        elif judge.provider not in self._providers:
            known = ", ".join(sorted(self._providers)) or "none"
            raise JobRefused(
                f"the judge's model {judge.model!r} names the provider {judge.provider!r}, which is not configured "
                f"(configured: {known}): add [providers.{judge.provider}], with its base_url unless it is one of "
                "litellm's"
            )

    async def ask(self, subject: Subject, messages: Sequence[Mapping[str, Any]], form: dict[str, Any]) -> ModelAnswer:
        """Return one answer; `form` is its JSON schema. Raise JobRefused if the provider refuses the request for
        good, JobPostponed if it asks for a pause or the run's engines have no spare capacity, JobFailure if it cannot
        be reached, fails, is too slow or does not answer as a model."""
        judge = subject.judge
        self.check(judge)
        if judge.run_model is not None and self._runs is not None:
            return await self._runs.ask(subject, messages, form)
        assert judge.provider is not None, "no kind without a provider asks a model"
        body: dict[str, Any] = {
            "model": judge.provider_model,
            "messages": list(messages),
            "max_tokens": judge.max_tokens,
        }
        if judge.temperature is not None:
            body["temperature"] = judge.temperature
        try:
            # httpx bounds each read; a server that sends a byte now and then would pass those bounds for ever.
            async with asyncio.timeout(judge.timeout_seconds):
                if self._settings[judge.provider].structured:
                    body["response_format"] = response_format(form)
                return await self._providers[judge.provider].complete(judge, body)
        except TimeoutError as error:
            raise JobFailure(f"the judge's model did not answer within {judge.timeout_seconds:g} seconds") from error
