"""`python -m trainer --config FILE [--run NAME]… [--proxy URL] [--set SECTION.KEY=VALUE]… [--profile]
[--dry-run]`
`python -m trainer fit sft|dpo|reward-model …` fits to chosen sessions or to preferences (`trainer/fit/command.py`).
`python -m trainer replay RUN VERSION [--verify]` makes a past step again (`trainer/replay/command.py`).

`python -m trainer presets` prints how far apart the gradients of the presets are (`trainer/distances_command.py`).

`base-rl train` starts it in as many processes as are asked for (`trainer/launch.py`), and so does torchrun:
`torchrun --nproc-per-node 2 -m trainer --config FILE`. There, write `--set run=NAME` for `--run NAME`, which torchrun
takes for an option of its own.

SIGTERM and SIGINT end it cleanly wherever it is: claims are given back, the exit status is 0. A second one kills.
Exit status 2: the configuration is wrong; 1: it cannot go on; 75: this rank was out of memory, and its launcher
starts all of them again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from proxy.contract.visible import visible
from trainer import log
from trainer.algorithm.contradictions import check_reference, check_teacher
from trainer.algorithm.parts import as_json
from trainer.algorithm.presets import resolve
from trainer.algorithm.presets import warnings as algorithm_warnings
from trainer.config import OF_THE_PROCESS, TrainerSettings, load_runs, merge, parse_assignment
from trainer.errors import ConfigurationError, RanksStartAgain, TrainerError
from trainer.observe.metrics.sinks import check_directories, check_installed
from trainer.parallel.layout import layout_of
from trainer.runtime.restarts import STATUS, LastWords, Restarts, end_with_launcher


class Interrupted(BaseException):
    """A signal asked for the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["replay"]:
        from trainer.replay.command import main as replay

        return replay(words[1:])
    if words[:1] == ["fit"]:
        from trainer.fit.command import main as fit

        return fit(words[1:])
    if words[:1] == ["presets"]:
        from trainer.distances_command import main as presets

        return presets(words[1:])
    options = _parser().parse_args(words)
    try:
        runs = load_runs(options.config, _overrides(options), only=options.run)
        if options.profile:
            runs = {name: _profiled(settings) for name, settings in runs.items()}
        for name, settings in runs.items():
            _check(settings, name if len(runs) > 1 else None)
        check_directories([settings.metrics for settings in runs.values()])
    except ConfigurationError as error:
        sys.stderr.write(f"{visible(str(error))}\n")
        return _last_words(error)
    warnings = [(name, each) for name, settings in runs.items() for each in algorithm_warnings(settings.algorithm)]
    if options.dry_run:
        for _, each in warnings:
            sys.stderr.write(f"warning: {visible(each)}\n")
        sys.stdout.write(f"{json.dumps(_resolved(runs), indent=2)}\n")
        return 0
    log.configure(next(iter(runs.values())).log_level)
    for name, each in warnings if _rank() == 0 else ():
        structlog.get_logger("trainer").warning("a part of the algorithm cannot act", run=name, reason=each)
    return _run(runs)


def _run(runs: Mapping[str, TrainerSettings]) -> int:
    """Trains; the exit status."""
    failed: dict[str, TrainerError] = {}
    try:
        _listen()
        end_with_launcher()
        _train(runs, failed)
    except Interrupted:
        structlog.get_logger("trainer").info("ended by a signal")
    except TrainerError as error:
        return _ended(error)
    except Exception:
        if (lost := _lost_peer()) is None:
            raise
        structlog.get_logger("trainer").error("ended, as another rank did", rank=lost.rank, reason=lost.reason)
        return 1
    return _status(list(failed.values()))


def _ended(error: TrainerError) -> int:
    """Says why; the exit status."""
    logger = structlog.get_logger("trainer")
    if isinstance(error, RanksStartAgain):
        logger.warning("ranks start again", reason=str(error))
    else:
        logger.error("cannot go on", error=type(error).__name__, reason=str(error))
    return _last_words(error)


def _last_words(error: TrainerError) -> int:
    """Leaves to the launcher why this rank ends; the exit status."""
    status = STATUS if isinstance(error, RanksStartAgain) else _status([error])
    if (launcher := Restarts.of_launcher()) is not None:
        launcher.say(LastWords(rank=_rank(), status=status, reason=str(error)))
    return status


def _speak(_kind: object, error: BaseException | None, _trace: object) -> None:
    """Before this rank leaves its peers, which look for its words as soon as they miss it."""
    if isinstance(error, TrainerError):
        _last_words(error)


def _lost_peer() -> LastWords | None:
    """The words of another rank that has ended: collectives with it fail here, in whatever way."""
    launcher = Restarts.of_launcher()
    said = launcher.said() if launcher is not None else None
    return said if said is not None and said.rank != _rank() else None


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _status(errors: Sequence[TrainerError]) -> int:
    """What the process ends with after these."""
    if not errors:
        return 0
    return 2 if all(isinstance(error, ConfigurationError) for error in errors) else 1


def _profiled(settings: TrainerSettings) -> TrainerSettings:
    if settings.profile.steps:
        return settings
    return settings.model_copy(update={"profile": settings.profile.model_copy(update={"steps": 3})})


def _check(settings: TrainerSettings, name: str | None) -> None:
    """Check what can be known before any model is there. Raises ConfigurationError, about the run `name` where it is
    one of several."""
    try:
        algorithm = resolve(settings.algorithm)
        check_teacher(settings.teacher, algorithm)
        check_reference(settings.reference, algorithm)
        if algorithm.user_functions:
            _decide_threads(settings.threads)
            from trainer.algorithm.trial import try_functions  # it imports torch, which others need not wait for here

            try_functions(algorithm)
        settings.optimizer.check_end()
        check_installed(settings.metrics.sinks)
        layout = layout_of(settings)
        if layout is not None and settings.nproc is not None:
            layout.check_world(settings.nproc, asked=True)
    except ConfigurationError as error:
        raise ConfigurationError(f"run {name}: {error}" if name is not None else str(error)) from error


def _train(runs: Mapping[str, TrainerSettings], failed: dict[str, TrainerError]) -> None:
    """Trains until a signal. Of several runs, those that cannot go on are added to `failed`, and the others do. torch
    is imported here, after its threads are decided."""
    settings = next(iter(runs.values()))
    _check_processes(runs)
    _decide_threads(settings.threads)
    import torch

    from trainer.assembly import Shared, begin
    from trainer.claims.presence import new_process_name
    from trainer.parallel.mesh import join
    from trainer.rotation import train_in_turns

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    process = new_process_name()
    with ExitStack() as ending:
        ranks = join(settings.device, offload=any(each.offload for each in runs.values()))
        ending.callback(ranks.leave)
        ending.push(_speak)
        if len(runs) > 1:
            train_in_turns(runs, ranks, process, failed)
            return
        alone = begin(settings.run, settings, ranks, process, Shared(ranks.device))
        ending.callback(alone.ending.close)
        alone.loop.run()


def _decide_threads(threads: int | None) -> None:
    """Tell the libraries below torch how many threads to start: they read it when torch is imported."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _check_processes(runs: Mapping[str, TrainerSettings]) -> None:
    """Raises ConfigurationError where there are more or fewer than is asked for."""
    there = int(os.environ.get("WORLD_SIZE", "1"))
    for settings in runs.values():
        if settings.nproc is not None and settings.nproc != there:
            raise ConfigurationError(
                f"trainer.nproc is {settings.nproc}, and {there} {'process was' if there == 1 else 'processes were'}"
                f" started: `base-rl train --nproc {settings.nproc}` starts as many"
            )
        if (layout := layout_of(settings)) is not None:
            layout.check_world(there)


def _listen() -> None:
    """The first rank ends by an exception, which unwinds through the clean-up; the others just end."""
    if _rank() != 0:
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, interrupt)


def _resolved(runs: Mapping[str, TrainerSettings]) -> dict[str, Any]:
    """Of one run, its own; of several, what they have in common, and `runs` by name."""
    worlds = [layout.world for each in runs.values() if (layout := layout_of(each)) is not None]
    if worlds:
        runs = {name: settings.model_copy(update={"nproc": worlds[0]}) for name, settings in runs.items()}
    values = {name: _resolved_run(settings) for name, settings in runs.items()}
    if len(values) == 1:
        return next(iter(values.values()))
    common = {key: value for key, value in next(iter(values.values())).items() if key in OF_THE_PROCESS}
    return {**common, "runs": {name: _without(each, common) for name, each in values.items()}}


def _without(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _resolved_run(settings: TrainerSettings) -> dict[str, Any]:
    algorithm = resolve(settings.algorithm)
    parts = as_json(algorithm) | {part: asdict(function) for part, function in algorithm.user_functions.items()}
    return {**settings.model_dump(mode="json"), "algorithm": {"preset": settings.algorithm.preset, **parts}}


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for assignment in options.set:
        overrides = merge(overrides, parse_assignment(assignment))
    if options.proxy is not None:
        overrides["proxy_url"] = options.proxy
    return overrides


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Trains a run's policy from its rewards.")
    parser.add_argument("--config", type=Path, help="the run's TOML file; its [trainer] section is read")
    parser.add_argument(
        "--run", action="append", default=[], help="name of the run to train (trainer.run); several: in fair turns"
    )
    parser.add_argument("--proxy", metavar="URL", help="address of the proxy (trainer.proxy_url)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any option, for example batch.trajectories=64",
    )
    parser.add_argument(
        "--profile", action="store_true", help="trace three steps by torch's profiler (or trainer.profile.steps)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and exit")
    return parser


if __name__ == "__main__":
    status = main()
    # Everything is closed by now. Taking the interpreter down with torch in it takes up to seconds, and what the
    # library of a hanging sink would do at the exit may take for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
