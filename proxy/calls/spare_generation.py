"""Generate one answer in an engine's spare capacity: for shadow answers and for judges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import cast

from proxy.calls.capture import Capture
from proxy.clock import Clock
from proxy.engines.place import EnginePlace
from proxy.engines.protocol import EngineChunk, GenerateRequest
from proxy.engines.spare import SpareSlot
from proxy.errors import BaseRlError

# How often an engine is asked again whether other proxies' calls, of which reports are seconds old, have ended.
_ELSEWHERE_SECONDS = 1.0


class CapacityRevoked(Exception):
    """Calls need the engine: begin again with a new capture."""


async def others_use(place: EnginePlace, busy_share: float) -> bool:
    """Return whether other proxies' calls are at an engine that has to be without calls, after a wait if so."""
    if busy_share or not place.load.tokens_elsewhere:
        return False
    await asyncio.sleep(_ELSEWHERE_SECONDS)
    return True


async def generate_in_spare(
    slot: SpareSlot, place: EnginePlace, capture: Capture, vocabulary_size: int, clock: Clock
) -> None:
    """Wait for the slot, which is one of the place's engine, and let the capture take the engine's answer.

    Raise CapacityRevoked if calls needed the engine meanwhile.
    """
    plan = capture.plan
    request = GenerateRequest(
        request_id=plan.turn_id,
        input_ids=plan.prompt.plan.input_ids,
        sampling=plan.sampling,
        stream=plan.watched,
        vocabulary_size=vocabulary_size,
        adapter=place.adapter,
    )
    outstanding = len(request.input_ids) + plan.sampling.max_new_tokens
    satisfied = False
    try:
        async with slot:
            place.begin(outstanding)
            try:
                generated = cast("AsyncGenerator[EngineChunk, None]", place.engine.generate(request))
                async with aclosing(generated) as chunks:
                    async for chunk in chunks:
                        capture.feed(place.labelled(chunk), clock())
                        if plan.watched and capture.satisfied and not satisfied and capture.finish is None:
                            satisfied = True
                            with suppress(BaseRlError):  # without the abort, it ends at its bound
                                await place.engine.abort(plan.turn_id)
            finally:
                place.end(outstanding)
    except TimeoutError as error:
        if slot.revoked:
            raise CapacityRevoked from error
        raise
