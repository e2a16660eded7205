"""Requests that wait for their first token: called back when the weights change, and sent again.

SGLang reuses prefixes by the key of a request, and computes long prompts in chunks. A request that was sent before a
swap and computed after it would continue a prefix of the weights before, under the label of the new ones. So
nothing is sent while an engine is paused; requests without a token are aborted and sent again under the key of the
new weights; and an answer whose first token comes from other weights than its key names is not used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from proxy.engines.requests import engine_request_id

ATTEMPTS = 32
"""Times that a request is sent. Only weights that change without a pause in between can use them up."""
# After so many recalls the next pause waits for the request's first token: a prompt that takes longer than the time
# between two versions would otherwise never be computed.
_PATIENCE = 2

_Result = TypeVar("_Result")


class PromptRecalled(Exception):
    """The weights changed before the request had a token: send it again."""


class WaitingPrompt:
    """A request until its first token, over all times that it is sent. `label` names the weights of its last key."""

    def __init__(self, request_id: str) -> None:
        self.recalls = 0
        self.is_aborted = False
        self.is_answered = False
        """Whether the first token has come; from then on nothing is recalled."""
        self.label: str | None = None
        self._request_id = request_id
        self._is_recalled = False
        self._limit: asyncio.Timeout | None = None

    @property
    def engine_id(self) -> str:
        """The request's id in the engine. No attempt's id begins with another's: an engine may abort an earlier
        attempt late, when it notices the closed connection."""
        return engine_request_id(f"{self._request_id}~{self.recalls}" if self.recalls else self._request_id)

    def recall(self) -> None:
        """Interrupt `until_recalled`, now or when it is next called."""
        if self.is_answered:
            return
        self._is_recalled = True
        if self._limit is not None:
            with suppress(RuntimeError):  # raised if the wait has just ended; the next one raises
                self._limit.reschedule(asyncio.get_running_loop().time())

    def send_again(self) -> None:
        """Begin the next attempt."""
        self.recalls += 1
        self._is_recalled = False

    async def until_recalled(self, awaited: Awaitable[_Result]) -> _Result:
        """Return the result of `awaited`. Raises PromptRecalled, after cancelling it, once `recall` is called."""
        if self.is_answered:
            return await awaited
        try:
            async with asyncio.timeout(0 if self._is_recalled else None) as self._limit:
                return await awaited
        except TimeoutError as error:
            if not self._is_recalled:
                raise
            raise PromptRecalled from error
        finally:
            self._limit = None


class PromptGate:
    """The requests of one engine that have no token yet. While it is closed, none is sent."""

    def __init__(self) -> None:
        self._waiting: dict[str, WaitingPrompt] = {}
        self._opened: asyncio.Event | None = None
        """None while the gate is open."""
        self._progress = asyncio.Event()

    def enter(self, request_id: str) -> WaitingPrompt:
        """Return a new request, which is recalled until it leaves."""
        prompt = self._waiting[request_id] = WaitingPrompt(request_id)
        return prompt

    def leave(self, request_id: str) -> None:
        """Forget a request: it has its first token, or has ended."""
        self._waiting.pop(request_id, None)
        self._progress.set()

    def abort(self, request_id: str) -> None:
        """Do not send the request again."""
        if request_id in self._waiting:
            self._waiting[request_id].is_aborted = True

    async def passed(self) -> None:
        """Wait while the gate is closed: as long as the engine is paused."""
        while self._opened is not None:
            await self._opened.wait()

    def close(self) -> None:
        """Let no request pass until `open`."""
        if self._opened is None:
            self._opened = asyncio.Event()

    def open(self) -> None:
        """Let requests pass."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.set()

    def recall(self) -> None:
        """Call all requests back."""
        for prompt in self._waiting.values():
            prompt.recall()

    async def settled(self, seconds: float) -> None:
        """Wait until no request is left that was recalled several times, for `seconds` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(prompt.recalls >= _PATIENCE for prompt in self._waiting.values()):
                    self._progress.clear()
                    await self._progress.wait()
