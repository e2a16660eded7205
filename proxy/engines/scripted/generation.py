"""One answer on its way out: how many of its tokens are said by now, under which weights, and why it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from proxy.engines.scripted.script import Failure
from proxy.engines.scripted.wire import Sampling

Finish = dict[str, Any]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What will be said if nothing comes between: `failure` in place of the end, once the tokens are out. Delays in
    seconds: before the first token, and between two."""

    ids: tuple[int, ...]
    finish: Finish
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
    decode: Callable[[tuple[int, ...]], str],
) -> tuple[tuple[int, ...], Finish]:
    """The tokens of an answer that a caller gets, and why they end: stop token, stop string, or bound on tokens.

    An answer that is `repeated` goes on from its beginning until the bound, as does any where the end of the text is
    to be passed over.
    """
    if sampling.ignore_eos:
        ids = tuple(token for token in ids if token not in stop_ids) or ids
        stop_ids, repeated = frozenset(), True
    if repeated:
        ids = (ids * (limit // len(ids) + 1))[:limit]
    if sampling.stop_token_ids and not sampling.ignore_eos:
        stop_ids = stop_ids.union(sampling.stop_token_ids)
    ids, more = ids[:limit], len(ids) > limit
    finish: Finish = {"type": "length", "length": len(ids)}
    for index, token in enumerate(ids):
        if token in stop_ids:
            ids, finish = ids[: index + 1], {"type": "stop", "matched": token}
            break
    if sampling.stop:
        texts = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop
        found = _first_stop(ids, texts, decode)
        if found is not None:
            ids, finish = ids[: found[0]], {"type": "stop", "matched": found[1]}
    assert finish["type"] == "stop" or more or len(ids) == limit
    return ids, finish


def _first_stop(
    ids: tuple[int, ...], texts: list[str], decode: Callable[[tuple[int, ...]], str]
) -> tuple[int, str] | None:
    """After how many tokens one of the texts is there, and which."""

    def matched(count: int) -> str | None:
        text = decode(ids[:count])
        found = [(text.find(each), each) for each in texts if each in text]
        return min(found)[1] if found else None

    if matched(len(ids)) is None:
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if matched(middle) is not None else (middle + 1, high)
    text = matched(low)
    assert text is not None
    return low, text


class Clockwork:
    """What all generations share: the label of the weights, and whether the engine is paused."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.paused = False
        self.live: set[Generation] = set()

    def abort(self, rid: str | None) -> None:
        """Ends the requests whose id begins so, as SGLang does, or all of them for None."""
        for generation in tuple(self.live):
            if rid is None or generation.rid.startswith(rid):
                generation.abort("Aborted")

    def pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for generation in self.live:
                generation.retractions += 1 if generation.said else 0

    def resume(self) -> None:
        self.paused = False
        for generation in self.live:
            generation.wake()


class Generation:
    """`said` tokens of the plan are out; `spans` says under which label each was."""

    def __init__(self, rid: str, plan: Plan, clockwork: Clockwork) -> None:
        self.rid = rid
        self.plan = plan
        self.said = 0
        self.retractions = 0
        self.aborted: Finish | None = None
        self.spans: list[list[Any]] = []
        self._clockwork = clockwork
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finish(self) -> Finish:
        return self.aborted or self.plan.finish

    @property
    def waits(self) -> bool:
        """Whether the next tokens take time."""
        return self._clockwork.paused or self.plan.delay > 0 or self.plan.interval > 0

    def abort(self, message: str) -> None:
        self.aborted = {"type": "abort", "message": message, "status_code": None, "err_type": None}
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def steps(self, *, whole: bool) -> AsyncIterator[None]:
        """One step when new tokens are said: all at once where `whole` and nothing takes time, else one by one.
        Tokens that are overdue come together."""
        loop = asyncio.get_running_loop()
        total, interval = len(self.plan.ids), self.plan.interval
        due = loop.time() + self.plan.delay
        while self.aborted is None and self.said < total:
            if self._clockwork.paused:
                await self._wait(None)
                due = max(due, loop.time())
                continue
            ahead = due - loop.time()
            if ahead > 0:
                await self._wait(ahead)
                continue
            count = 1
            if interval > 0:
                count = min(1 + int(-ahead / interval), total - self.said)
                due += count * interval
            elif whole:
                count = total - self.said
            self._say(count)
            yield
            if interval == 0 and not whole:
                await asyncio.sleep(0)
        if total == 0:
            await self._idle_until(due)

    def _say(self, count: int) -> None:
        label, start = self._clockwork.label, self.said
        self.said += count
        if self.spans and self.spans[-1][0] == label:
            self.spans[-1][2] = self.said
        else:
            self.spans.append([label, start, self.said])

    async def _idle_until(self, due: float) -> None:
        """The wait before a failure that comes without any token."""
        loop = asyncio.get_running_loop()
        while self.aborted is None and (self._clockwork.paused or due > loop.time()):
            await self._wait(None if self._clockwork.paused else due - loop.time())

    async def _wait(self, seconds: float | None) -> None:
        """Until woken, or for so long."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, self.wake)
        try:
            await self._waiter
        finally:
            if timer is not None:
                timer.cancel()
