"""The turns of several runs on one trainer.

What waits for what:
- each run's thread waits at its proxy for a batch (`claims/prefetch.py`); meanwhile the process trains the others.
- a run whose proxy is down is begun once its proxy answers, for which a thread of its own waits (`arrivals.py`).
- `_next` waits while no run has a batch, and any of these threads wakes it. If only one run has a batch, it waits
  for `DECIDED_WITHIN` at most for a run with less training time to learn whether it has one too. A step under way is
  never interrupted.
- a request to a proxy or a teacher that is down is retried for `PATIENCE` seconds only. Then the run abandons its
  step and waits, on its thread, for the proxy to answer; it continues from its head.
- ranks other than the first wait in `from_first` for its choice, so all give each turn to the same run, and begin and
  end the same runs.

An error that ends one run's training does not end the others'.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from threading import Condition

import structlog
from structlog.contextvars import bound_contextvars

from trainer.assembly import RunTrainer
from trainer.claims.prefetch import BatchPrefetcher
from trainer.errors import MemoryExhausted, ProxySilent, RanksStartAgain, RunArchived, TeacherSilent, TrainerError
from trainer.observe.clock import ELSEWHERE, WAITING
from trainer.parallel.mesh import Ranks
from trainer.rotation.roster import Action, Change, Roster
from trainer.runtime.fairness import FairShare

PATIENCE = 10.0
"""Seconds of retries in a run's turn, which count as its own time. The last attempt may take its time-out in
addition."""

Begin = Callable[[str, float], RunTrainer]
"""(name of a run's section, patience in seconds) → the run, ready to resume from its head. A collective."""

_log = structlog.get_logger("trainer")


class Turns:
    """The turns of several runs. Every rank has the same runs in the same order, and all runs share `changed`.

    Runs of the `roster` are begun by `begin` when they arrive. Runs that end by an error are added to `failed`.
    """

    def __init__(
        self, roster: Roster, begin: Begin, ranks: Ranks, changed: Condition, failed: dict[str, TrainerError]
    ) -> None:
        self._roster = roster
        self._begin = begin
        self._ranks = ranks
        self._changed = changed
        self._failed = failed
        self._runs: dict[str, RunTrainer] = {}
        self._share = FairShare()
        self._to_resume: set[str] = set()

    def run(self) -> None:
        """Train until interrupted, or until no run is left and none can arrive."""
        if self._ranks.is_first:
            self._roster.start()
        while True:
            began = time.perf_counter()
            chosen = self._ranks.from_first(self._next)
            self._add(WAITING, time.perf_counter() - began)
            if chosen is None:
                return
            if isinstance(chosen, Change):
                self._change(chosen)
            else:
                self._turn(self._runs[chosen])

    def close(self) -> None:
        """Give back what all runs hold."""
        with ExitStack() as ending:
            for run in self._runs.values():
                ending.callback(run.ending.close)
            # First of all, so that the sinks of all runs share the few seconds that the trainer waits for them.
            for run in self._runs.values():
                ending.callback(run.instruments.finish)
            ending.callback(self._roster.close)

    def _next(self) -> Change | str | None:
        """Return the change of the roster, or else the run whose turn it is; None if no run is left."""
        with self._changed:
            while True:
                if (change := self._roster.next_change(self._runs)) is not None:
                    return change
                if not self._runs and self._roster.is_empty:
                    return None
                now = time.monotonic()
                ready = [run.name for run in self._runs.values() if _prefetcher(run).is_ready]
                undecided = {
                    run.name: left for run in self._runs.values() if (left := _prefetcher(run).undecided_for(now)) > 0
                }
                chosen = self._share.choose(ready, undecided)
                if chosen is not None:
                    return chosen
                self._changed.wait(min(undecided.values(), default=None))

    def _change(self, change: Change) -> None:
        with bound_contextvars(run=change.run):
            match change.action:
                case Action.BEGIN:
                    self._begin_run(change.run)
                case Action.FAIL:
                    assert change.error is not None
                    self._end(change.run, change.error)
                case Action.LEAVE:
                    _log.info("the run is not active any more, and is let go")
                    self._let_go(change.run)

    def _begin_run(self, name: str) -> None:
        began = time.perf_counter()
        try:
            run = self._begin(name, PATIENCE)
        except (ProxySilent, TeacherSilent) as error:
            _log.warning("the run cannot be begun now, trying again later", reason=str(error))
            if self._ranks.is_first:
                with self._changed:
                    self._roster.retry(name)
            return
        except TrainerError as error:
            self._end(name, error)
            return
        finally:
            self._add(ELSEWHERE, time.perf_counter() - began)
        run.connection.client.patience = PATIENCE
        if run.teacher is not None:
            run.teacher.patience = PATIENCE
        self._runs[name] = run
        self._failed.pop(name, None)
        self._share.join(name, run.weight)
        self._to_resume.add(name)
        if self._ranks.is_first:
            with self._changed:
                self._roster.begun(name)
            self._ask(run)

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
                self._end(run.name, error)
            run.instruments.set_aside()
        seconds = time.perf_counter() - began
        self._add(ELSEWHERE, seconds, besides=run)
        if run.name in self._runs:
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

    def _end(self, name: str, error: TrainerError) -> None:
        """Record that a run cannot be trained any more; the log's context names it. An archived run is let go, which
        is no failure."""
        if self._ranks.is_first:
            with self._changed:
                self._roster.give_up(name)
        self._let_go(name)
        if isinstance(error, RunArchived):
            _log.info("the run is archived, and is let go")
            return
        self._failed[name] = error
        others = list(self._runs)
        _log.error("this run is not trained any more", error=type(error).__name__, reason=str(error), others=others)

    def _let_go(self, name: str) -> None:
        """Give back what a run holds. Do nothing if it was not begun."""
        run = self._runs.pop(name, None)
        if run is None:
            return
        self._share.leave(name)
        self._to_resume.discard(name)
        run.ending.close()
        # The parts of a run refer to each other, and another run may need the memory of its model at once.
        del run
        gc.collect()

    def _add(self, phase: str, seconds: float, besides: RunTrainer | None = None) -> None:
        for run in self._runs.values():
            if run is not besides:
                run.instruments.clock.add(phase, seconds)


def _prefetcher(run: RunTrainer) -> BatchPrefetcher:
    assert run.prefetcher is not None
    return run.prefetcher
