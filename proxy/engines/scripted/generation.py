"""One answer on its way out: the tokens produced so far, the weights that they belong to, and the reason of the
end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from proxy.engines.common import replies
from proxy.engines.common.wire import Sampling
from proxy.engines.scripted.script import Failure

_Decode = Callable[[tuple[int, ...]], str]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as it goes out unless the request is aborted. `failure` replaces the end, once the tokens are out.
    `delay` is in seconds before the first token, `interval` in seconds between two tokens."""

    ids: tuple[int, ...]
    finish: replies.Finish
    delay: float
    interval: float
    failure: Failure | None = None


def cut(
    ids: tuple[int, ...],
    sampling: Sampling,
    *,
    limit: int,
    stop_ids: frozenset[int],
    repeated: bool,
    decode: _Decode,
) -> tuple[tuple[int, ...], replies.Finish]:
    """Return the tokens of an answer that the caller gets, and why they end: stop token, stop string, or `limit`.

    A `repeated` answer starts again until it has `limit` tokens; so does every answer under `ignore_eos`, because a
    model would continue there.
    """
    if sampling.ignore_eos:
        ids = tuple(token for token in ids if token not in stop_ids) or ids
        stop_ids, repeated = frozenset(), True
    if repeated:
        ids = (ids * (limit // len(ids) + 1))[:limit]
    if sampling.stop_token_ids and not sampling.ignore_eos:
        stop_ids = stop_ids.union(sampling.stop_token_ids)
    ids, is_longer = ids[:limit], len(ids) > limit
    finish = replies.full_length(len(ids))
    for index, token in enumerate(ids):
        if token in stop_ids:
            ids, finish = ids[: index + 1], replies.stopped(token)
            break
    found = _first_stop(ids, sampling.stop_strings, decode)
    if found is not None:
        ids, finish = ids[: found[0]], replies.stopped(found[1])
    assert finish["type"] == "stop" or is_longer or len(ids) == limit
    return ids, finish


def _first_stop(ids: tuple[int, ...], texts: Sequence[str], decode: _Decode) -> tuple[int, str] | None:
    """Return after how many tokens the first stop string is complete, and which one it is; None without one."""

    def matched(count: int) -> str | None:
        text = decode(ids[:count])
        found = [(text.find(each), each) for each in texts if each in text]
        return min(found)[1] if found else None

    if not texts or matched(len(ids)) is None:
        return None
    # Bisection, because every probe decodes the answer from its start.
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if matched(middle) is not None else (middle + 1, high)
    text = matched(low)
    assert text is not None
    return low, text


class SharedState:
    """The state that all generations share: the label of the weights, whether the engine is paused, and who is
    `live`."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.paused = False
        self.live: set[Generation] = set()

    def abort(self, rid: str | None) -> None:
        """End the requests whose id starts with `rid`, as SGLang does, or all requests for None."""
        for generation in tuple(self.live):
            if rid is None or generation.rid.startswith(rid):
                generation.abort("Aborted")

    def pause(self, mode: str) -> None:
        """Stop all generations; `mode` is one of SGLang's three."""
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for generation in self.live:
                generation.retractions += 1 if generation.produced else 0

    def resume(self) -> None:
        """Continue all generations."""
        self.paused = False
        for generation in self.live:
            generation.wake()


class Generation:
    """The progress of one answer: `produced` tokens of the plan are out, under the labels in `spans`."""

    def __init__(self, rid: str, plan: Plan, state: SharedState, adapter: str | None = None) -> None:
        self.rid = rid
        self.plan = plan
        self.adapter = adapter
        self.produced = 0
        self.retractions = 0
        self.aborted: replies.Finish | None = None
        self.spans = replies.WeightSpans()
        self._state = state
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finish(self) -> replies.Finish:
        """The reason of the end, once the answer has ended."""
        return self.aborted or self.plan.finish

    @property
    def label(self) -> str:
        """The label of the next tokens: the adapter's name, or the label of the loaded weights."""
        return self._state.label if self.adapter is None else self.adapter

    @property
    def waits(self) -> bool:
        """Whether the next tokens take time."""
        return self._state.paused or self.plan.delay > 0 or self.plan.interval > 0

    def abort(self, message: str) -> None:
        """End the answer with the tokens produced so far."""
        self.aborted = replies.aborted(message)
        self.wake()

    def wake(self) -> None:
        """End the current wait, so that `steps` reads the state again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def steps(self, *, whole: bool) -> AsyncIterator[None]:
        """Yield whenever there are new tokens: all at once if `whole` and without an interval, else one by one.
        Tokens that are overdue come together, so a late timer does not slow the answer down."""
        loop = asyncio.get_running_loop()
        total, interval = len(self.plan.ids), self.plan.interval
        due = loop.time() + self.plan.delay
        while self.aborted is None and self.produced < total:
            if self._state.paused:
                await self._wait(None)
                due = max(due, loop.time())
                continue
            remaining = due - loop.time()
            if remaining > 0:
                await self._wait(remaining)
                continue
            count = 1
            if interval > 0:
                count = min(1 + int(-remaining / interval), total - self.produced)
                due += count * interval
            elif whole:
                count = total - self.produced
            self.produced += count
            self.spans.extend(self.label, self.produced)
            yield
            if interval == 0 and not whole:
                await asyncio.sleep(0)  # so that other answers, and aborts, get their turn
        if total == 0:
            await self._idle_until(due)

    async def _idle_until(self, due: float) -> None:
        """Wait as long as the first token would take, before a failure that comes without any token."""
        loop = asyncio.get_running_loop()
        while self.aborted is None and (self._state.paused or due > loop.time()):
            await self._wait(None if self._state.paused else due - loop.time())

    async def _wait(self, seconds: float | None) -> None:
        """Wait until woken, for `seconds` at most."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, self.wake)
        try:
            await self._waiter
        finally:
            if timer is not None:
                timer.cancel()
