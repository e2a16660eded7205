"""Generate the choices of one model call, record them, and hand the answer to the requests that wait for it.

Each call has a task of its own: a client that disconnects must neither interrupt a commit nor end the answer of a
repeated request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import cast

from proxy.calls.call import Answer, Delta, StreamHead
from proxy.calls.capture import Capture
from proxy.calls.constraints import place_of
from proxy.clock import Clock
from proxy.contract.turn import TurnState
from proxy.engines.fair_queue import FairShare
from proxy.engines.faults import EngineFaults
from proxy.engines.place import EnginePlace
from proxy.engines.protocol import Engine, EngineChunk, EngineFinish, GenerateRequest
from proxy.errors import (
    BaseRlError,
    EngineFailed,
    EngineUnavailable,
    InvalidEngineReply,
    Unavailable,
    UnsupportedParameter,
)
from proxy.log import logger

ABORT_SECONDS = 5.0
"""Seconds that an engine may take to end an aborted generation and to report which versions produced its tokens."""

CHOICES_AT_ONCE = 32
"""How many choices of one call are at the engine together. Sending hundreds at once, as a list of prompts asks for,
would make the calls of all other clients wait behind them."""

Record = Callable[[Sequence[tuple[Capture, TurnState]]], Awaitable[Answer]]
"""Commit the turns, one for every choice, and return the answer as it was recorded."""

_LOG = logger(__name__)


class Generation:
    """All choices of one call. `wait` returns the recorded answer; `deltas` the text as it comes, for one reader.

    Every request that waits for the answer calls `hold` and, in the end, `release`. When the last one releases an
    unfinished generation, it is aborted and recorded as truncated.
    """

    def __init__(
        self,
        head: StreamHead,
        captures: Sequence[Capture],
        *,
        place: EnginePlace,
        share: FairShare,
        another_place: Callable[[EnginePlace], EnginePlace | None],
        clock: Clock,
        record: Record,
        vacate: Callable[[], Awaitable[object]] | None,
        faults: EngineFaults,
        vocabulary_size: int,
        engine_lost: Callable[[Engine], None],
        ended: Callable[[Generation], None],
    ) -> None:
        """`share` is the run's at its engines. `another_place` finds an engine for a call whose own is down;
        `engine_lost` reports that one."""
        self.head = head
        self.call = captures[0].plan.call
        self.abandoned = False
        self.answer: Answer | None = None
        """The answer once it is recorded. None for a generation that failed."""
        self.is_complete = False
        """Whether every choice is recorded as complete."""
        self._captures = tuple(captures)
        self._place = place
        self._share = share
        self._another_place = another_place
        self._has_moved = False
        self._outstanding_tokens = sum(_outstanding_tokens(capture) for capture in captures)
        place.begin(self._outstanding_tokens)
        self._clock = clock
        self._record = record
        self._vacate = vacate
        self._has_recorded = False
        self._faults = faults
        self._vocabulary_size = vocabulary_size
        self._engine_lost = engine_lost
        self._ended = ended
        self.holders = 0
        """Requests that wait for the answer."""
        self._started: set[str] = set()
        self._limits: list[asyncio.Timeout] = []
        self._deltas: list[Delta] = []
        self._news: asyncio.Future[None] | None = None
        """Done at the next delta or at the end; None while no reader waits for one."""
        self._aborting: asyncio.Task[None] | None = None
        # A task of its own, which no client's disconnection cancels.
        self._task = asyncio.create_task(self._run(), name=f"generation {head.turn_id}")
        self._task.add_done_callback(self._task_ended)

    @property
    def done(self) -> bool:
        return self._task.done()

    @property
    def tokens_used(self) -> int:
        """Tokens of prompts and answers so far; none before the first token of an answer."""
        generated = sum(capture.token_count for capture in self._captures)
        return self.head.prompt_tokens + generated if generated else 0

    def hold(self) -> None:
        self.holders += 1

    def release(self) -> None:
        self.holders -= 1
        if self.holders <= 0 and not self.done:
            self.abandon()

    def abandon(self) -> None:
        """Abort the generation and keep the tokens produced so far."""
        if self.abandoned or self.done:
            return
        self.abandoned = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            with suppress(RuntimeError):  # raised if the engine has finished: only the commit is left
                limit.reschedule(now + ABORT_SECONDS if self._started else now)
        if self._started:
            self._aborting = asyncio.create_task(self._abort())

    async def wait(self) -> Answer:
        """Return the recorded answer, or raise the call's error. Cancelling the waiter does not stop it."""
        return await asyncio.shield(self._task)  # several requests may wait for one task

    async def ended_within(self, patience: float) -> bool:
        """Return whether the generation ends, well or not, within `patience` seconds."""
        if not self.done:  # does what asyncio.wait does at less than half of its cost
            waiter = asyncio.get_running_loop().create_future()
            wake = partial(_wake, waiter)
            self._task.add_done_callback(wake)
            try:
                await _done_within(waiter, patience)
            finally:
                self._task.remove_done_callback(wake)
        return self.done

    async def ended_before(self, other: asyncio.Future[None]) -> bool:
        """Return whether the generation ends, well or not, before `other` is done."""
        await asyncio.wait((self._task, other), return_when=asyncio.FIRST_COMPLETED)
        return self.done

    async def deltas(self, patience: float) -> list[Delta] | None:
        """Return the deltas since the last call: none after `patience` seconds without one, None at the end."""
        if not self._deltas and not self.done:
            self._news = asyncio.get_running_loop().create_future()
            await _done_within(self._news, patience)
            self._news = None
        if not self._deltas:
            return None if self.done else []
        taken, self._deltas = self._deltas, []
        return taken

    async def _run(self) -> Answer:
        try:
            states = await self._generate_or_record_failure()
            # Also if the engine finished before the abort reached it: nobody receives this answer.
            if self.abandoned and self.holders <= 0:
                states = [TurnState.TRUNCATED] * len(states)
            if TurnState.TRUNCATED in states and not any(capture.token_count for capture in self._captures):
                raise Unavailable("the call was ended before its first token")
            for capture in self._captures:
                self._show(capture.flush())
            self.answer = await self._record(tuple(zip(self._captures, states, strict=True)))
            self.is_complete = all(state is TurnState.COMPLETE for state in states)
            return self.answer
        except BaseRlError:
            # Before the client sees the error: a session that the call opened must be gone by then.
            if self._vacate is not None and not self._has_recorded:
                await self._vacate()
            raise

    async def _generate_or_record_failure(self) -> list[TurnState]:
        try:
            if len(self._captures) == 1:
                return [await self._generate(self._captures[0])]
            return await self._generate_all()
        except BaseRlError as error:
            if isinstance(error, EngineUnavailable):
                # Now, and not at the next health check: the next calls need not fail as well.
                self._engine_lost(self._place.engine)
            if isinstance(error, InvalidEngineReply):
                self._faults.note(self._place.engine.name, error.reason)
            await self._record_failure(error)
            raise

    async def _record_failure(self, error: BaseRlError) -> None:
        """Record the tokens that came before the error; after an invalid reply, also a turn without tokens."""
        is_invalid = isinstance(error, InvalidEngineReply)
        begun = [
            capture
            for capture in self._captures
            if capture.token_count or (is_invalid and capture.plan.turn_id in self._started)
        ]
        if not begun:
            return
        engine = self._place.engine.name
        _LOG.warning("generation failed", turn=self.head.turn_id, engine=engine, error=error.message)
        for capture in begun:
            capture.failure = f"{error.message} (engine {engine})"
        await self._record([(capture, TurnState.FAILED) for capture in begun])
        self._has_recorded = True

    async def _generate_all(self) -> list[TurnState]:
        """Generate all choices, `CHOICES_AT_ONCE` together. When one fails, cancel the others and raise its error."""
        own_slots = asyncio.Semaphore(CHOICES_AT_ONCE)

        async def generate_in_turn(capture: Capture) -> TurnState:
            # Before a slot of the engine's: a choice that waits here must not occupy one that other calls could use.
            async with own_slots:
                return TurnState.TRUNCATED if self.abandoned else await self._generate(capture)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(generate_in_turn(capture)) for capture in self._captures]
        except* BaseRlError as errors:
            raise next(_leaves(errors)) from None
        return [task.result() for task in tasks]

    async def _generate(self, capture: Capture) -> TurnState:
        """Generate a choice; if the engine is down, once more on another one that serves the run."""
        place = self._place
        try:
            return await self._generate_at(place, capture)
        except EngineUnavailable:
            other = self._move_from(place)
            if other is None:
                raise
        return await self._generate_at(other, capture)

    def _move_from(self, lost: EnginePlace) -> EnginePlace | None:
        """Move the call from an engine that is down to another; None if there is none, or if the call may not move.

        Only a call without any token moves: the client may have received those that there are, and another engine
        would generate others.
        """
        if self.abandoned or any(capture.token_count for capture in self._captures):
            return None
        if self._place is not lost:  # another choice of this call was here first
            return self._place
        other = None if self._has_moved else self._another_place(lost)
        if other is not None:
            self._has_moved = True
            self._engine_lost(lost.engine)
            lost.end(self._outstanding_tokens)
            other.begin(self._outstanding_tokens)
            self._place = other
        return other

    async def _generate_at(self, place: EnginePlace, capture: Capture) -> TurnState:
        plan = capture.plan
        request = GenerateRequest(
            request_id=plan.turn_id,
            input_ids=plan.prompt.plan.input_ids,
            sampling=plan.sampling,
            stream=plan.call.stream or plan.watched,
            top_logprobs=plan.call.top_logprobs,
            vocabulary_size=self._vocabulary_size,
            adapter=place.adapter,
        )
        limit, satisfied = asyncio.timeout(None), False
        self._limits.append(limit)
        try:
            async with limit, place.load.slots.slot(self._share):
                if self.abandoned:  # while it waited for a slot
                    return TurnState.TRUNCATED
                self._started.add(plan.turn_id)
                generated = cast("AsyncGenerator[EngineChunk, None]", place.engine.generate(request))
                async with aclosing(generated) as chunks:
                    async for chunk in chunks:
                        self._show(capture.feed(place.labelled(chunk), self._clock()))
                        if plan.watched and capture.satisfied and not satisfied and capture.finish is None:
                            satisfied = True
                            with suppress(BaseRlError):  # without the abort, the generation ends at its bound
                                await place.engine.abort(plan.turn_id)
        except UnsupportedParameter as error:
            raise UnsupportedParameter(error.message, param=place_of(plan.call)) from error
        except TimeoutError:
            if not limit.expired():
                raise
            return TurnState.TRUNCATED
        if capture.finish is None:
            raise EngineFailed("the engine's answer broke off: its last chunk never came")
        ended_whole = capture.finish is not EngineFinish.ABORT or capture.satisfied
        return TurnState.COMPLETE if ended_whole else TurnState.TRUNCATED

    def _show(self, deltas: list[Delta]) -> None:
        if deltas:
            self._deltas += deltas
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._news is not None:
            _wake(self._news)

    def _task_ended(self, task: asyncio.Task[Answer]) -> None:
        if not task.cancelled():
            task.exception()  # asyncio logs it as never retrieved if nobody waits for the answer
        self._place.end(self._outstanding_tokens)
        self._wake_reader()
        self._ended(self)

    async def _abort(self) -> None:
        for turn_id in sorted(self._started):
            with suppress(BaseRlError):  # without the abort, the generation ends by itself or by its time limit
                await self._place.engine.abort(turn_id)


def _leaves(errors: BaseExceptionGroup[BaseRlError]) -> Iterator[BaseRlError]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def _done_within(waiter: asyncio.Future[None], patience: float) -> None:
    """Return when `waiter` is done, which it is after `patience` seconds at the latest."""
    timer = asyncio.get_running_loop().call_later(patience, _wake, waiter)
    try:
        await waiter
    finally:
        timer.cancel()


def _wake(waiter: asyncio.Future[None], *_: object) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _outstanding_tokens(capture: Capture) -> int:
    """Return how many tokens a choice may come to: those of its prompt, and the new ones that it is allowed."""
    plan = capture.plan
    return len(plan.prompt.plan.input_ids) + plan.sampling.max_new_tokens
