"""Generate answers in engines' spare capacity: for shadow answers, candidates' unseen answers, and judges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import aclosing, suppress
from typing import cast

from proxy.calls.capture import CallPlan, Capture
from proxy.calls.runtime import ModelRuntime
from proxy.clock import Clock
from proxy.engines.faults import EngineFaults
from proxy.engines.place import EnginePlace
from proxy.engines.protocol import EngineChunk, EngineFinish, GenerateRequest
from proxy.engines.spare import SpareSlot
from proxy.errors import BaseRlError, InvalidEngineReply

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


class SpareAnswer:
    """One answer in spare capacity. It begins again, with no tokens, whenever calls have needed the engine.

    `capture` is that of the newest attempt, which began in its slot at `begun_at`; None while it waits for one.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        next_plan: Callable[[], CallPlan],
        *,
        busy_share: float,
        clock: Clock,
        faults: EngineFaults,
        begins: Callable[[], None] = lambda: None,
        revoked: Callable[[], None] = lambda: None,
    ) -> None:
        """`next_plan` returns the plan of an attempt, each with an id of its own. `begins` is called when an attempt
        has its slot, `revoked` when calls have taken it."""
        self.capture: Capture | None = None
        self.begun_at: float | None = None
        self._runtime = runtime
        self._next_plan = next_plan
        self._busy_share = busy_share
        self._clock = clock
        self._faults = faults
        self._begins = begins
        self._revoked = revoked

    async def generate(self, find_place: Callable[[], Awaitable[EnginePlace]]) -> Capture:
        """Return the answer at the place that `find_place` returns, which may raise. Raise the engine's errors."""
        while True:
            place = await find_place()
            if await others_use(place, self._busy_share):
                continue
            plan = self._next_plan()
            capture = Capture(plan, self._runtime.decoder, self._runtime.choices.read_as(plan.call))
            self.capture = capture
            slot = place.load.slots.spare(self._busy_share)
            try:
                await generate_in_spare(
                    slot, place, capture, self._runtime.vocabulary_size, self._clock, begins=self._has_slot
                )
            except InvalidEngineReply as error:
                self._faults.note(place.engine.name, error.reason)
                raise
            except CapacityRevoked:
                self.begun_at = None
                self._revoked()
                continue
            capture.flush()
            return capture

    def _has_slot(self) -> None:
        self.begun_at = self._clock()
        self._begins()


class AnswerTasks:
    """The tasks of this process that generate answers for which nobody waits, with the session of each."""

    def __init__(self) -> None:
        self._sessions: dict[asyncio.Task[None], str] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, answer: Coroutine[object, object, None], session_id: str, *, name: str) -> None:
        task = asyncio.create_task(answer, name=name)
        self._sessions[task] = session_id
        task.add_done_callback(lambda done: self._sessions.pop(done, None))

    def forget(self, session_ids: Collection[str]) -> None:
        """Cancel the answers of erased sessions."""
        for task, session_id in list(self._sessions.items()):
            if session_id in session_ids:
                task.cancel()

    async def aclose(self) -> None:
        """Cancel all answers."""
        tasks = list(self._sessions)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_whole(capture: Capture) -> bool:
    """Return whether the answer has its end, which may be its bound on tokens."""
    return capture.finish is not None and (capture.finish is not EngineFinish.ABORT or capture.satisfied)


async def generate_in_spare(
    slot: SpareSlot,
    place: EnginePlace,
    capture: Capture,
    vocabulary_size: int,
    clock: Clock,
    *,
    begins: Callable[[], None] = lambda: None,
) -> None:
    """Wait for the slot, which is one of the place's engine, and let the capture take the engine's answer.

    `begins` is called when there is a slot.

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
            begins()
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
