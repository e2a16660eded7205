"""Prefetch a run's next batch on a thread while the process trains other runs.

The thread waits for a batch from the proxy, then until the loop has taken it and asks for the next one. Thread and
loop wake each other by a shared condition. The run makes no version between asking and taking, so a prefetched batch
grows no staler; its lease is renewed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from threading import Condition, Thread

from proxy.contract.claim import ClaimedBatch
from trainer.algorithm.running import RunningMeans
from trainer.claims.filling import BatchSource
from trainer.claims.leased import LeasedClaims
from trainer.errors import ProxySilent

DECIDED_WITHIN = 1.0
"""Seconds that the proxy has to answer whether it has a batch; after them the run counts as having none."""


class BatchPrefetcher:
    """Fetches one batch at a time. Only the first rank has one. `changed` is shared by all runs of the process."""

    def __init__(self, claims: LeasedClaims, source: BatchSource, changed: Condition) -> None:
        self._claims = claims
        self._source = source
        self._changed = changed
        self._asked: Callable[[], ClaimedBatch | None] | None = None
        self._undecided_until: float | None = None
        self._found: ClaimedBatch | Exception | None = None
        self._is_ready = False
        self._ended = False
        # The thread logs in the context of its creator, which names the run.
        self._thread = Thread(target=copy_context().run, args=(self._work,), name="prefetch", daemon=True)

    def ask(self, version: int, means: RunningMeans) -> None:
        """Begin to fetch the batch to train from `version`, with the running means before it."""
        self._ask(partial(self._batch, version, means))

    def ask_for_proxy(self) -> None:
        """Begin to wait until the proxy answers at all."""
        self._ask(self._answer)

    @property
    def is_ready(self) -> bool:
        """Return whether the requested batch or answer has arrived. Call it with `changed` locked."""
        return self._is_ready

    def undecided_for(self, now: float) -> float:
        """Return the seconds left after `now` (of `time.monotonic`) for the proxy to report a batch; 0 if it has
        answered or took too long. Call it with `changed` locked."""
        return 0.0 if self._undecided_until is None else max(0.0, self._undecided_until - now)

    def take(self, version: int, means: RunningMeans) -> ClaimedBatch | None:
        """Wait for the requested batch and return it. Raises the errors of `BatchSource.take`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready)
            found, self._found = self._found, None
        if isinstance(found, Exception):
            raise found
        return found

    def stop(self) -> None:
        """End the thread without waiting for the proxy. A batch that arrives later is given back, or its lease
        expires."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _ask(self, what: Callable[[], ClaimedBatch | None]) -> None:
        with self._changed:
            self._asked, self._is_ready, self._found = what, False, None
            self._undecided_until = time.monotonic() + DECIDED_WITHIN
            self._changed.notify_all()
        if not self._thread.is_alive():
            self._thread.start()

    def _work(self) -> None:
        while (asked := self._next()) is not None:
            found: ClaimedBatch | Exception | None
            try:
                found = asked()
            except Exception as error:  # noqa: BLE001 - raised again where the batch is taken
                found = error
            with self._changed:
                self._undecided_until, self._found, self._is_ready = None, found, True
                self._changed.notify_all()

    def _next(self) -> Callable[[], ClaimedBatch | None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._asked is not None)
            asked, self._asked = self._asked, None
            return None if self._ended else asked

    def _batch(self, version: int, means: RunningMeans) -> ClaimedBatch | None:
        """Return the batch, None only at the end."""
        # First without waiting: the rotation learns at once whether the run has a batch now.
        batch, waits = None, False
        while batch is None and not self._ended:
            with suppress(ProxySilent):
                batch = self._source.take(version, means, waits=waits)
            if batch is None:
                self._decided()
            waits = True
        # Nobody takes a batch that arrives after the end.
        if self._ended:
            self._claims.give_back()
        return batch

    def _answer(self) -> None:
        self._decided()
        while not self._ended:
            with suppress(ProxySilent):
                self._claims.await_proxy()
                return

    def _decided(self) -> None:
        """Record that the proxy has no batch right now, and wake the rotation, which waits for that."""
        with self._changed:
            self._undecided_until = None
            self._changed.notify_all()
