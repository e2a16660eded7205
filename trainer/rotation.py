"""Several runs on one trainer: they take turns when they have a batch, with equal shares of time.

What waits for what:
- each run's thread waits at its proxy for a batch (`claims/prefetch.py`); meanwhile the process trains the others.
- `_next` waits while no run has a batch, and any of these threads wakes it. If only one run has a batch, it waits
  for `DECIDED_WITHIN` at most for a run with less training time to learn whether it has one too. A step under way is
  never interrupted.
- a request to a proxy or a teacher that is down is retried for `PATIENCE` seconds only. Then the run abandons its
  step and waits, on its thread, for the proxy to answer; it continues from its head.
- ranks other than the first wait in `from_first` for its choice, so all give each turn to the same run.

An error that ends one run's training does not end the others'.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from threading import Condition

import structlog
from structlog.contextvars import bound_contextvars

from trainer.assembly import RunTrainer, Shared, begin
from trainer.claims.prefetch import BatchPrefetcher
from trainer.config import TrainerSettings
from trainer.errors import MemoryExhausted, ProxySilent, RanksStartAgain, TeacherSilent, TrainerError
from trainer.observe.clock import ELSEWHERE, WAITING
from trainer.parallel.mesh import Ranks
from trainer.runtime.fairness import FairShare

PATIENCE = 10.0
"""Seconds of retries in a run's turn, which count as its own time. The last attempt may take its time-out in
addition."""
START_PATIENCE = 300.0
"""Seconds of retries before any run is trained. They are longer because proxies are often started together with
their trainer."""

_log = structlog.get_logger("trainer")


def train_in_turns(
    runs: Mapping[str, TrainerSettings], ranks: Ranks, process: str, failed: dict[str, TrainerError]
) -> None:
    """Train until interrupted, or until every run has ended by an error. Errors are added to `failed` as they
    happen."""
    changed = Condition()
    shared = Shared(ranks.device, changed)
    begun = []
    with ExitStack() as ending:
        for name, settings in runs.items():
            with bound_contextvars(run=name):
                try:
                    run = begin(name, settings, ranks, process, shared, START_PATIENCE)
                except TrainerError as error:
                    failed[name] = error
                    _log_end(error, [other for other in runs if other not in failed])
                    continue
            ending.callback(run.ending.close)
            begun.append(run)
        ending.callback(_finish, begun)
        Turns(begun, ranks, changed, failed).run()


class Turns:
    """The turns of several runs. Every rank has the same `runs` in the same order, and all runs share `changed`.
    Runs that end by an error are added to `failed`."""

    def __init__(
        self, runs: Sequence[RunTrainer], ranks: Ranks, changed: Condition, failed: dict[str, TrainerError]
    ) -> None:
        self._runs = list(runs)
        self._ranks = ranks
        self._changed = changed
        self._failed = failed
        self._share = FairShare({run.name: run.weight for run in runs})
        self._to_resume = {run.name for run in runs}
        for run in runs:
            run.connection.client.patience = PATIENCE
            if run.teacher is not None:
                run.teacher.patience = PATIENCE

    def run(self) -> None:
        """Train until interrupted, or until no run is left."""
        if self._ranks.is_first:
            for run in self._runs:
                self._ask(run)
        while self._runs:
            began = time.perf_counter()
            place = self._ranks.from_first(self._next)
            self._add(WAITING, time.perf_counter() - began)
            self._turn(self._runs[place])

    def _next(self) -> int:
        """Return the place of the run whose turn it is."""
        with self._changed:
            while True:
                now = time.monotonic()
                ready = [run.name for run in self._runs if _prefetcher(run).is_ready]
                undecided = {
                    run.name: left for run in self._runs if (left := _prefetcher(run).undecided_for(now)) > 0
                }
                chosen = self._share.choose(ready, undecided)
                if chosen is not None:
                    return [run.name for run in self._runs].index(chosen)
                self._changed.wait(min(undecided.values(), default=None))

    def _turn(self, run: RunTrainer) -> None:
        began = time.perf_counter()
        with bound_contextvars(run=run.name):
            run.instruments.take_up()
            try:
                self._work(run)
            except (ProxySilent, TeacherSilent) as error:
                _log.warning("giving the step up, and waiting without keeping other runs", reason=str(error))
                self._to_resume.add(run.name)
            except TrainerError as error:
                if isinstance(error, MemoryExhausted | RanksStartAgain) and self._ranks.size > 1:
                    raise  # the other ranks wait in a collective, so the launcher must start all again
                self._end(run, error)
            run.instruments.set_aside()
        seconds = time.perf_counter() - began
        self._add(ELSEWHERE, seconds, besides=run)
        if run in self._runs:
            self._share.spend(run.name, seconds)
            if self._ranks.is_first:
                self._ask(run)

    def _work(self, run: RunTrainer) -> None:
        if run.name in self._to_resume:
            run.loop.resume()
            self._to_resume.remove(run.name)
        else:
            run.loop.step()

    def _ask(self, run: RunTrainer) -> None:
        if run.name in self._to_resume:
            _prefetcher(run).ask_for_proxy()
        else:
            _prefetcher(run).ask(run.loop.head.version, run.loop.means)

    def _end(self, run: RunTrainer, error: TrainerError) -> None:
        self._failed[run.name] = error
        self._runs.remove(run)
        self._share.leave(run.name)
        run.ending.close()
        _log_end(error, [each.name for each in self._runs])

    def _add(self, phase: str, seconds: float, besides: RunTrainer | None = None) -> None:
        for run in self._runs:
            if run is not besides:
                run.instruments.clock.add(phase, seconds)


def _finish(runs: Sequence[RunTrainer]) -> None:
    """Tell the sinks of all runs to end, so that they share the few seconds that the trainer waits."""
    for run in runs:
        run.instruments.finish()


def _log_end(error: TrainerError, left: Sequence[str]) -> None:
    """Log that a run is no longer trained; the log's context names it."""
    _log.error("this run is not trained any more", error=type(error).__name__, reason=str(error), others=list(left))


def _prefetcher(run: RunTrainer) -> BatchPrefetcher:
    assert run.prefetcher is not None
    return run.prefetcher
