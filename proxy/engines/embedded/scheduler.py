"""The model thread: one running batch, which requests join and leave between decode steps.

All methods but `start`, `submit`, `add` and `close` run in that thread. A weight update or a pause is a function
passed to `submit`, so it happens between two steps and never within one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TypeVar

import torch

from proxy.engines.embedded.generation import Generation
from proxy.engines.embedded.grammar import allowed_next
from proxy.engines.embedded.model import ServedModel
from proxy.engines.embedded.sampling import BatchRules, sample
from proxy.engines.embedded.weights import NewWeights

log = logging.getLogger("base_rl.embedded")

# Most prompt tokens, padding included, in one prefill: it bounds the memory, and the wait of running requests.
_PREFILL_TOKENS = 8192
# Most logits in one prefill, which computes one column for each distinct prompt length.
_PREFILL_LOGITS = 1 << 26

_Result = TypeVar("_Result")


class Scheduler:
    """Owner of the model. `max_running` bounds the batch, `max_total_tokens` the slots × positions of the cache."""

    def __init__(
        self,
        model: ServedModel,
        *,
        weight_label: str,
        max_running: int,
        max_total_tokens: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.model = model
        self.weight_label = weight_label
        self.max_running = max_running
        self._max_total_tokens = max_total_tokens
        self._loop = loop
        self._paused = False
        self._closing = False
        self._arrivals = 0
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._rules: BatchRules | None = None
        self._woken: list[Generation] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        # A daemon, so that a step that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Start the model thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current step; running requests are aborted."""
        self.submit(self._shut)
        self._thread.join()

    def submit(self, command: Callable[[], _Result]) -> concurrent.futures.Future[_Result]:
        """Run a function in the model thread, between two steps."""
        future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001 - passed to the caller
                future.set_exception(error)

        self._enqueue(run)
        return future

    def add(self, generation: Generation) -> None:
        """Queue a request."""
        self._enqueue(lambda: self._enter(generation))

    def abort(self, rid: str | None) -> int:
        """End the requests with this id, or all requests for None. Return their number."""
        found = [each for each in (*self._running, *self._waiting) if rid is None or each.rid == rid]
        for generation in found:
            generation.abort("Aborted")
        self._sweep()
        return len(found)

    def drop(self, generation: Generation) -> None:
        """End a request whose client has gone."""
        if generation.finish is None:
            generation.abort("The client has gone")
            self._sweep()

    def pause(self, mode: str) -> None:
        """Stop generating; `abort` ends all requests, `retract` returns them to the queue, `in_place` freezes
        them."""
        self._paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for generation in sorted(self._running, key=lambda each: each.arrival, reverse=True):
                self._retract(generation)

    def resume(self) -> None:
        """Continue generating."""
        self._paused = False

    def load(self, weights: NewWeights, *, label: str | None) -> None:
        """Replace weights; later tokens carry `label`. Running requests continue with their cache."""
        weights.put()
        if label is not None:
            self.weight_label = label

    def flush(self) -> bool:
        """Release the cache's memory; return False, with nothing done, while requests run or wait."""
        if self._running or self._waiting:
            return False
        self.model.cache.clear()
        return True

    def counts(self) -> dict[str, int]:
        """Return the numbers of running and waiting requests."""
        return {"running": len(self._running), "waiting": len(self._waiting)}

    def _enqueue(self, command: Callable[[], None]) -> None:
        # Under the condition's lock, so that the thread cannot miss a command between its check and its wait.
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _shut(self) -> None:
        self.abort(None)
        self._closing = True

    def _enter(self, generation: Generation) -> None:
        if generation.finish is None:
            self._arrivals += 1
            generation.arrival = self._arrivals
            self._waiting.append(generation)

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._closing:
                while self._commands:
                    self._commands.popleft()()
                self._deliver()
                if self._paused or not (self._running or self._waiting):
                    with self._wake:
                        self._wake.wait_for(lambda: bool(self._commands) or self._closing)
                    continue
                try:
                    self._admit()
                    self._step()
                except Exception as error:
                    log.exception("a step failed; the requests in it are answered with an error")
                    self._fail_running(error)
                self._deliver()

    def _admit(self) -> None:
        """Prefill waiting requests together, oldest first, as slots and cache allow."""
        while self._waiting and len(self._running) < self.max_running:
            group = self._next_group()
            if not group:
                return
            rows = len(self._running)
            contexts = [generation.prompt + generation.output for generation in group]
            self._reserve(rows + len(group), max(len(ids) for ids in contexts) + 1)
            # Running from here on, so that a failing prefill fails them too.
            self._running.extend(group)
            self._rules = None
            logits = self.model.prefill(contexts, rows, [each.adapter for each in group])
            self._accept(group, logits, BatchRules([each.rules for each in group], self.model.device))
            self._sweep()

    def _next_group(self) -> list[Generation]:
        """Take the waiting requests for the next prefill from the queue. A request larger than every bound runs
        alone."""
        group: list[Generation] = []
        lengths: set[int] = set()
        longest_prompt = 0
        longest = max((each.position for each in self._running), default=0) + 2
        while self._waiting and len(self._running) + len(group) < self.max_running:
            length = self._waiting[0].position + 1
            longest_prompt = max(longest_prompt, length)
            longest = max(longest, length + 1)
            lengths.add(length)
            count = len(group) + 1
            fits = (len(self._running) + count) * longest <= self._max_total_tokens
            small = (
                count * longest_prompt <= _PREFILL_TOKENS
                and count * len(lengths) * self.model.vocabulary <= _PREFILL_LOGITS
            )
            if (group or self._running) and not fits:
                break
            if group and not small:
                break
            group.append(self._waiting.popleft())
        return group

    def _step(self) -> None:
        """Generate one token for every running request."""
        if not self._running:
            return
        length = max(each.position for each in self._running) + 1
        # The newest requests give way: the oldest ones are nearest to their end.
        while len(self._running) > 1 and len(self._running) * length > self._max_total_tokens:
            self._retract(max(self._running, key=lambda each: each.arrival))
            length = max(each.position for each in self._running) + 1
        self._reserve(len(self._running), length)
        if self._rules is None:
            self._rules = BatchRules([each.rules for each in self._running], self.model.device)
        logits = self.model.step(
            [each.output[-1] for each in self._running],
            [each.position for each in self._running],
            [each.adapter for each in self._running],
        )
        self._accept(self._running, logits, self._rules)
        self._sweep()

    def _accept(self, generations: Sequence[Generation], logits: torch.Tensor, rules: BatchRules) -> None:
        allowed = self._allowed(generations, rules) if rules.constrained_rows else None
        draw = sample(logits, rules, [each.output for each in generations], self.model.generator, allowed)
        label = self.weight_label
        drawn = zip(generations, draw.tokens_b.tolist(), draw.logprobs_b.tolist(), strict=True)
        for row, (generation, token, logprob) in enumerate(drawn):
            if generation.finish is not None:
                continue
            generation.accept(token, logprob, generation.label(label), draw.tops.get(row))
            if generation.stream and generation.finish is None:
                self._woken.append(generation)

    def _allowed(self, generations: Sequence[Generation], rules: BatchRules) -> torch.Tensor:
        """Return the allowed tokens of the constrained requests. A request whose grammar has failed ends here."""
        constrained = [generations[row] for row in rules.constrained_rows]
        states = [each.grammar for each in constrained if each.grammar is not None]
        allowed = allowed_next(states, self.model.vocabulary)
        for generation, state in zip(constrained, states, strict=True):
            if (failure := state.failure) is not None:
                generation.abort(f"the constraint cannot be followed any further: {failure}", HTTPStatus.BAD_REQUEST)
        return allowed.to(self.model.device)

    def _reserve(self, rows: int, length: int) -> None:
        used = max((each.position for each in self._running), default=0)
        self.model.cache.reserve(rows, length, used_rows=len(self._running), used_length=used)

    def _sweep(self) -> None:
        """Remove finished requests from the batch and the queue."""
        for row in range(len(self._running) - 1, -1, -1):
            if self._running[row].finish is not None:
                self._finish(self._remove(row))
        for generation in [each for each in self._waiting if each.finish is not None]:
            self._waiting.remove(generation)
            self._finish(generation)

    def _remove(self, row: int) -> Generation:
        """Remove a request from the batch; the last one moves into its slot."""
        generation = self._running[row]
        last = self._running.pop()
        if last is not generation:
            self._running[row] = last
            self.model.cache.move(len(self._running), row, last.position)
        self._rules = None
        return generation

    def _retract(self, generation: Generation) -> None:
        """Return a request to the head of the queue; its cache is computed again when it rejoins the batch."""
        self._remove(self._running.index(generation))
        generation.retractions += 1
        self._waiting.appendleft(generation)

    def _finish(self, generation: Generation) -> None:
        generation.final_label = generation.label(self.weight_label)
        self._woken.append(generation)

    def _fail_running(self, error: Exception) -> None:
        for generation in self._running:
            generation.fail(f"the engine failed: {type(error).__name__}: {error}")
        self._sweep()
        self.model.cache.clear()

    def _deliver(self) -> None:
        """Wake the HTTP side, once for all tokens of a step: every call from another thread costs a system call."""
        if self._woken:
            woken, self._woken = self._woken, []
            self._loop.call_soon_threadsafe(_notify, woken)


def _notify(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.notify()
