"""The process that trains: its signals, its exit status, and the reason that it leaves to its launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType

import structlog

from proxy.contract.importing import importing
from trainer.config import TrainerSettings
from trainer.errors import ConfigurationError, RanksStartAgain, TrainerError
from trainer.parallel.layout import layout_of
from trainer.rotation.plan import Plan
from trainer.runtime.restarts import STATUS, EndReport, Restarts, end_with_launcher


class Interrupted(BaseException):
    """A signal asked the process to end. Not an Exception, so that no handler of errors catches it."""


def run(plan: Plan) -> int:
    """Train the runs of the plan until the end and return the exit status."""
    failed: dict[str, TrainerError] = {}
    try:
        _listen()
        end_with_launcher()
        train(plan, failed)
    except Interrupted:
        structlog.get_logger("trainer").info("ended by a signal")
    except TrainerError as error:
        return _ended(error)
    except Exception:
        if (lost := _ended_peer()) is None:
            raise
        structlog.get_logger("trainer").error("ended, as another rank did", rank=lost.rank, reason=lost.reason)
        return 1
    return _status(list(failed.values()))


def _ended(error: TrainerError) -> int:
    """Log the error that ends the process and return the exit status."""
    logger = structlog.get_logger("trainer")
    if isinstance(error, RanksStartAgain):
        logger.warning("ranks start again", reason=str(error))
    else:
        logger.error("cannot go on", error=type(error).__name__, reason=str(error))
    return report_end(error)


def report_end(error: TrainerError) -> int:
    """Report to the launcher why this rank ends, and return the exit status."""
    status = STATUS if isinstance(error, RanksStartAgain) else _status([error])
    if (launcher := Restarts.of_launcher()) is not None:
        launcher.report(EndReport(rank=rank(), status=status, reason=str(error)))
    return status


def _report_error(_kind: object, error: BaseException | None, _trace: object) -> None:
    """Report the error before this rank leaves: its peers read the report as soon as a collective with it fails."""
    if isinstance(error, TrainerError):
        report_end(error)


def _ended_peer() -> EndReport | None:
    """Return the report of another rank that has ended; its end makes collectives fail here with any error."""
    launcher = Restarts.of_launcher()
    report = launcher.first_report() if launcher is not None else None
    return report if report is not None and report.rank != rank() else None


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _status(errors: Sequence[TrainerError]) -> int:
    """Return the exit status after these errors."""
    if not errors:
        return 0
    return 2 if all(isinstance(error, ConfigurationError) for error in errors) else 1


def train(plan: Plan, failed: dict[str, TrainerError]) -> None:
    """Train until a signal. If one of several runs cannot go on, add its error to `failed` and train the others.

    torch is imported here, because it reads its number of threads when it is imported.
    """
    settings = plan.process
    configured = [settings, *plan.runs.values()]
    _check_processes(configured)
    decide_threads(settings.threads)
    with importing():
        import torch

        from trainer.assembly import Shared, begin
        from trainer.claims.presence import new_process_name
        from trainer.parallel.mesh import join
        from trainer.rotation.training import train_in_turns

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    process = new_process_name()
    with ExitStack() as ending:
        ranks = join(settings.device, offload=any(each.offload for each in configured))
        ending.callback(ranks.leave)
        ending.push(_report_error)
        if plan.takes_turns:
            train_in_turns(plan, ranks, process, failed)
            return
        resolve = partial(plan.resolved, next(iter(plan.runs)))
        alone = begin(settings.run, settings, ranks, process, Shared(ranks.device), resolve=resolve)
        ending.callback(alone.ending.close)
        alone.loop.run()


def decide_threads(threads: int | None) -> None:
    """Set the number of threads of torch's libraries, which read it when torch is imported."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _check_processes(runs: Sequence[TrainerSettings]) -> None:
    """Raise ConfigurationError if the number of processes is not the configured one."""
    there = int(os.environ.get("WORLD_SIZE", "1"))
    for settings in runs:
        if settings.nproc is not None and settings.nproc != there:
            raise ConfigurationError(
                f"trainer.nproc is {settings.nproc}, and {there} {'process was' if there == 1 else 'processes were'}"
                f" started: `base-rl train --nproc {settings.nproc}` starts as many"
            )
        if (layout := layout_of(settings)) is not None:
            layout.check_world(there)


def _listen() -> None:
    """Make signals raise Interrupted on the first rank, which then gives claims back. Other ranks have nothing to
    clean up and just end."""
    if rank() != 0:
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A second signal kills, in case the clean-up hangs.
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, interrupt)
