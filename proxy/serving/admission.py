"""Check an engine before it is added to the pool, so that a wrong one is refused with what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from proxy.contract.policy import parse_weight_label
from proxy.engines.protocol import Engine, EngineInfo
from proxy.engines.sglang import public_address
from proxy.errors import EngineFailed, EngineTimeout, EngineUnavailable, InvalidRequest
from proxy.runs.service import RunDirectory, RunView, resolved_model
from proxy.serving.base_models import BaseModelCheck
from proxy.settings import ConfigurationError

# Longest wait for the engine's description of itself, which a ready engine gives at once.
_INFO_SECONDS = 10.0


class EngineAdmission:
    """Checks engines that somebody wants to add. Errors are InvalidRequest and name the field."""

    def __init__(
        self,
        *,
        runs: RunDirectory,
        make_engine: Callable[[str], Engine],
        context_length: Callable[[RunView], Awaitable[int | None]],
    ) -> None:
        """`context_length` returns that of the run's model in tokens; None if it is unknown."""
        self._runs = runs
        self._make_engine = make_engine
        self._context_length = context_length

    async def base_model(self, url: str, base_model: str | None, run: RunView | None) -> str:
        """Return the base model of the engine at `url`, after checking that it is ready and can serve runs of it.

        Without `base_model`, it is that of `run`, or the one that the engine reports.
        """
        info = await self._info(url)
        wanted = base_model and _resolved(base_model)
        if run is not None and wanted not in (None, run.base_model):
            raise InvalidRequest(
                f"base_model: the run {run.name!r} is on {run.base_model}: give that one, or omit it",
                param="base_model",
            )
        found = wanted or (run.base_model if run is not None else await self._reported_model(info))
        if (problem := await self._problem(info, found, run)) is not None:
            raise InvalidRequest(f"the engine at {public_address(url)} cannot be added: {problem}", param="url")
        return found

    async def _info(self, url: str) -> EngineInfo:
        try:
            engine = self._make_engine(url)
        except ConfigurationError as error:
            raise InvalidRequest(f"url: {error}", param="url") from error
        try:
            async with asyncio.timeout(_INFO_SECONDS):
                return await engine.info()
        except (EngineUnavailable, EngineTimeout, EngineFailed, TimeoutError) as error:
            reason = str(error) or f"no answer within {_INFO_SECONDS:.0f} s"
            raise InvalidRequest(
                f"no engine is ready at {public_address(url)} ({reason}): start one that speaks SGLang's native API,"
                " wait until it is ready, and add it again",
                param="url",
            ) from error
        finally:
            await engine.aclose()

    async def _reported_model(self, info: EngineInfo) -> str:
        label = parse_weight_label(info.weight_label)
        if label is None:
            return _resolved(info.model_path)
        # It holds a version that base-rl loaded, so its model path is that of the version.
        for run in await self._runs.list_():
            if run.id == label[0]:
                return run.base_model
        raise InvalidRequest(
            f"base_model: the engine holds weights of a run that this store does not have ({info.weight_label}):"
            " start it again with its base model, or give `base_model`",
            param="base_model",
        )

    async def _problem(self, info: EngineInfo, base_model: str, run: RunView | None) -> str | None:
        """Return why the engine cannot serve runs of the base model, or the one `run`; None if it can."""
        if (problem := await BaseModelCheck().problem(info, base_model)) is not None:
            return problem
        if run is not None and run.settings.weights == "adapter" and not info.named_adapters:
            return (
                f"it takes no LoRA adapters by name, which the run {run.name!r} needs: start SGLang with"
                " --enable-lora, or use the embedded engine"
            )
        candidates = [run] if run is not None else await self._runs.list_()
        for each in candidates:
            if each.base_model != base_model or each.is_archived or info.context_length is None:
                continue
            needed = await self._context_length(each)
            if needed is not None and info.context_length < needed:
                return (
                    f"its context has {info.context_length} tokens, and the run {each.name!r} has {needed}: start it"
                    f" with a context length of at least {needed}"
                )
        return None


def _resolved(model: str) -> str:
    try:
        return resolved_model(model)
    except (OSError, RuntimeError, ValueError) as error:  # such as a home directory of nobody
        raise InvalidRequest(f"base_model: {error}", param="base_model") from error
