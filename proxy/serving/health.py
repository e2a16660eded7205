"""The engine's state as the proxy knows it: which version it serves, and why it serves none."""

from __future__ import annotations

import asyncio

from proxy.contract.identifiers import RunId
from proxy.contract.policy import WeightsFormat, parse_weight_label
from proxy.engines.protocol import Engine, EngineInfo
from proxy.errors import EngineFailed, EngineTimeout, EngineUnavailable
from proxy.log import logger
from proxy.serving.records import ServingRecords

ENGINE_ERRORS = (EngineFailed, EngineUnavailable, EngineTimeout, TimeoutError)

# Longest wait for the engine's description of itself, which costs it nothing.
_INFO_SECONDS = 10.0
# Questions in a row that a slow engine may leave unanswered.
_MISSES_TO_BE_LOST = 3

_LOG = logger(__name__)


class EngineHealth:
    """The state of one engine for one run, renewed by `ask`.

    `version` is the version of the run that takes calls; None while there is none or the engine is lost. `formats`
    are the formats of weights that the engine loads; None while it has not reported them. `problem` is the reason of
    the last loss.
    """

    def __init__(self, engine: Engine, records: ServingRecords, run_id: RunId, engine_name: str) -> None:
        """`engine_name` is the name that events give the engine."""
        self._engine_name = engine_name
        self._engine = engine
        self._records = records
        self._run_id = run_id
        self._misses = 0
        self._must_answer = False
        self._is_ready: bool | None = None
        """Readiness in the event log; None before the first entry."""
        self.is_lost = False
        self.version: int | None = None
        self.formats: tuple[WeightsFormat, ...] | None = None
        self.problem: str | None = None
        self.adapter_names: tuple[str, ...] = ()
        """The adapters in the engine's memory at its last answer."""

    def suspect(self) -> None:
        """Count the engine as lost if it leaves the next question unanswered."""
        self._must_answer = True

    async def ask(self) -> EngineInfo | None:
        """Ask the engine what it holds; None without an answer.

        An engine that refuses connections is lost at once, a slow one after several questions without an answer.
        """
        # Taken before the question: a connection that is lost meanwhile concerns the next one.
        must_answer, self._must_answer = self._must_answer, False
        try:
            async with asyncio.timeout(_INFO_SECONDS):
                info = await self._engine.info()
        except ENGINE_ERRORS as error:
            self._misses += 1
            if must_answer or isinstance(error, EngineUnavailable) or self._misses >= _MISSES_TO_BE_LOST:
                self.is_lost, self.version, self.formats = True, None, None
                self.problem = str(error) or "the engine does not answer"
            return None
        self.is_lost, self._misses = False, 0
        self.adapter_names = info.adapter_names
        self.formats = tuple(WeightsFormat) if info.adapters else (WeightsFormat.HUGGINGFACE,)
        return info

    def version_in(self, info: EngineInfo) -> int | None:
        """Return the version of the run that the engine holds; None for other weights."""
        label = parse_weight_label(info.weight_label)
        return label[1] if label is not None and label[0] == self._run_id else None

    async def report_ready(self, version: int) -> None:
        """Append an event unless the engine was ready before. Raises StoreUnavailable."""
        before, self._is_ready = self._is_ready, True
        if before is True:
            return
        data: dict[str, object] = {"engine": self._engine_name, "version": version}
        _LOG.info("engine ready", **data)
        await self._records.append_event("engine.ready", data)

    async def report_lost(self, reason: str) -> None:
        """Take the engine out of service; append an event if it was ready before. Raises StoreUnavailable."""
        self.version = None
        self.problem = reason
        before, self._is_ready = self._is_ready, False
        if before is None:  # it is still starting
            _LOG.info("engine not ready yet", engine=self._engine.name, reason=reason)
        elif before:
            _LOG.warning("engine lost", engine=self._engine.name, reason=reason)
            await self._records.append_event("engine.lost", {"engine": self._engine_name, "reason": reason})
