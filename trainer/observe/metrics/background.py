"""A sink on a thread of its own, so that a sink that fails or hangs does not affect training."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from functools import partial

import structlog

from trainer.observe.metrics.sink import RunAbout, Sink, StepMetrics

CAPACITY = 1000
"""Steps that wait for a sink; further ones are dropped for that sink."""
_THREAD = "metrics-"

_log = structlog.get_logger("trainer.metrics")


class BackgroundSink:
    """Queues metrics for a sink. `put` never waits and never raises.

    Steps that the sink could not take are counted, and logged when that begins and at the end. The store has the
    metrics of every step.
    """

    def __init__(self, name: str, sink: Sink, run: RunAbout, *, capacity: int = CAPACITY) -> None:
        self.name = name
        self.written = 0
        self.failed = 0
        self.dropped = 0
        self._sink = sink
        self._run = run
        self._capacity = capacity
        self._waiting: deque[StepMetrics] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._in_trouble = False
        # A daemon in the context of its creator: a sink that hangs does not keep the process, and logs name the run.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._work,), name=f"{_THREAD}{name}", daemon=True
        )
        self._thread.start()

    def put(self, step: StepMetrics) -> None:
        with self._changed:
            if len(self._waiting) < self._capacity:
                self._waiting.append(step)
                self._changed.notify()
                return
            self.dropped += 1
        if self.dropped == 1:
            _log.warning("a sink is too slow: steps are dropped for it", sink=self.name, waiting=self._capacity)

    def finish(self) -> None:
        """Let the thread end after it has written the queued steps."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, deadline: float) -> bool:
        """Wait until the thread has ended, at most until `deadline` (of `time.monotonic`), and return whether it
        has. Log the number of steps that it did not write."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        ended = not self._thread.is_alive()
        with self._changed:
            missing = self.failed + self.dropped + len(self._waiting)
        if missing or not ended:
            _log.warning("a sink has not taken all steps", sink=self.name, missing=missing, hangs=not ended)
        return ended

    def _work(self) -> None:
        is_open = self._try(partial(self._sink.open, self._run))
        while (step := self._next()) is not None:
            is_open = is_open or self._try(partial(self._sink.open, self._run))
            if is_open and self._try(partial(self._sink.write, step)):
                self.written += 1
                self._works()
            else:
                self.failed += 1
        if is_open:
            self._try(self._sink.close)

    def _next(self) -> StepMetrics | None:
        """Return the next step; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # noqa: BLE001  (a third-party library may raise anything; it is logged, and training goes on)
            # Once per outage: a server that is down would fill the log with one line per step.
            if not self._in_trouble:
                reason = f"{type(error).__name__}: {error}"
                _log.warning("a sink failed; it is tried again with each step", sink=self.name, reason=reason)
            self._in_trouble = True
            return False
        return True

    def _works(self) -> None:
        if self._in_trouble:
            _log.info("a sink works again", sink=self.name, missing=self.failed)
        self._in_trouble = False
