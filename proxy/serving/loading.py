"""Put a version into the engine: pause generation, load the weights, resume. Engines that need no pause get none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from proxy.cancellation import despite_cancellation
from proxy.contract.exchange import Offer, Place
from proxy.contract.identifiers import RunId
from proxy.contract.memory import reading
from proxy.contract.policy import parse_weight_label, weight_label
from proxy.engines.protocol import Engine, EngineInfo, PauseMode
from proxy.errors import EngineFailed
from proxy.log import logger
from proxy.serving.faults import VersionFaults
from proxy.serving.health import ENGINE_ERRORS
from proxy.serving.offers import join
from proxy.serving.records import Target

# Longest wait for one attempt to resume, which no engine computes anything for.
_RESUME_SECONDS = 5.0
# Attempts to resume with doubling pauses, about three health intervals together; the next round tries again.
_RESUME_ATTEMPTS = 5

_NO_ADAPTERS = (
    "the version is a LoRA adapter, and this engine loads whole weights only: set trainer.adapter.publish = merged"
    " and start the trainer again, and its next version is served"
)

_LOG = logger(__name__)


class WeightLoader:
    """Loads versions of one run into one engine, which is never left paused: generation resumes also after a failed
    load and after a cancellation.

    `may_be_paused` is True at the first contact as well: an earlier proxy may have died during a swap.
    """

    def __init__(self, engine: Engine, run_id: RunId, faults: VersionFaults, *, retry_seconds: float) -> None:
        self._engine = engine
        self._run_id = run_id
        self._faults = faults
        self._retry_seconds = retry_seconds
        self.may_be_paused = True

    async def load(self, target: Target, info: EngineInfo) -> float | None:
        """Make the engine serve the target. Return for how many seconds generation stood still; None if the engine
        had the weights already and was only given their label.

        Raises EngineFailed if the engine refuses the weights, EngineUnavailable, EngineTimeout.
        """
        label = weight_label(self._run_id, target.version)
        if target.version == 0 and _holds_fresh_base(info, target.path):
            await self._engine.label_weights(label)
            return None
        if target.is_adapter and not info.adapters:
            # An engine of whole weights would skip the adapter's tensors and serve the base under the version's
            # label.
            raise EngineFailed(_NO_ADAPTERS)
        give = await self._way(target, label, info)
        if info.loads_between_steps:
            await self._give(target, give)
            return 0.0
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.may_be_paused = True
        try:
            await self._engine.pause(PauseMode.IN_PLACE)
            await self._give(target, give)
        finally:
            await self.resume()
        return loop.time() - began

    async def _way(self, target: Target, label: str, info: EngineInfo) -> Callable[[], Awaitable[None]]:
        """Return the call that gives the engine the target. A trainer that sends it is asked here, and not while
        generation is paused."""
        if target.before is None or target.offer is None:
            return partial(self._load_from, target, label)
        place = await join(target.offer, info.ranks)
        return partial(self._receive, place, target.offer, label, target.before, info)

    async def _give(self, target: Target, give: Callable[[], Awaitable[None]]) -> None:
        self._faults.version_given(target)
        try:
            await give()
        finally:
            # Again: the time of suspicion runs from the end of the load, which may take minutes.
            self._faults.version_given(target)

    async def _load_from(self, target: Target, label: str) -> None:
        if not target.is_in_memory:
            await self._engine.load_weights(target.path, label)
            return
        # The trainer removes versions from memory as soon as newer ones are there.
        with reading(Path(target.path)) as is_there:
            if not is_there:
                raise EngineFailed("the version was removed from memory before it was loaded")
            await self._engine.load_weights(target.path, label)

    async def _receive(self, place: Place, offer: Offer, label: str, before: Target, info: EngineInfo) -> None:
        """Have the engine receive the weights. Raises EngineFailed, EngineUnavailable, EngineTimeout.

        After a failure the engine has the version `before`: requests that wait for the end of the pause would go on
        with a mixture of weights.
        """
        try:
            await self._engine.receive_weights(place, offer, label)
        except ENGINE_ERRORS:
            if not info.loads_between_steps:  # else it exchanges its weights at the end, or not at all
                await self._load_from(before, weight_label(self._run_id, before.version))
            raise

    async def resume(self) -> bool:
        """Resume generation and return whether that worked. The attempts continue even if the caller is cancelled."""
        return await despite_cancellation(self._try_to_resume())

    async def _try_to_resume(self) -> bool:
        for attempt in range(_RESUME_ATTEMPTS):
            try:
                async with asyncio.timeout(_RESUME_SECONDS):
                    await self._engine.resume()
            except ENGINE_ERRORS as error:
                _LOG.warning("generation not resumed", attempt=attempt + 1, error=str(error))
                await asyncio.sleep(self._retry_seconds * 0.1 * 2**attempt)
            else:
                self.may_be_paused = False
                return True
        return False


def _holds_fresh_base(info: EngineInfo, base_model: str) -> bool:
    """Return whether the engine still has the base model that it started with, under a label that base-rl did not
    give."""
    if parse_weight_label(info.weight_label) is not None:
        return False
    return info.model_path == base_model or Path(info.model_path).resolve() == Path(base_model).resolve()
