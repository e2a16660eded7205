"""`python -m trainer --config FILE [--run NAME]… [--proxy URL] [--set SECTION.KEY=VALUE]… [--profile]
[--dry-run]` trains runs until it is ended.

`base-rl train` starts as many processes as configured (`trainer/launch.py`), and so does torchrun:
`torchrun --nproc-per-node 2 -m trainer --config FILE`. There, write `--set run=NAME` for `--run NAME`, which torchrun
would take for an option of its own.

SIGTERM and SIGINT end it cleanly at any point: claims are given back, the exit status is 0. A second signal kills it.
Exit status 2: the configuration is wrong; 1: training cannot go on; 75: this rank was out of memory, and its launcher
starts all ranks again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from proxy.contract.visible import visible
from trainer import log
from trainer.algorithm.contradictions import check_reference, check_teacher
from trainer.algorithm.presets import resolve
from trainer.algorithm.presets import warnings as algorithm_warnings
from trainer.config import TrainerSettings, load_runs, merge, parse_assignment
from trainer.errors import ConfigurationError
from trainer.observe.metrics.sinks import check_directories, check_installed
from trainer.parallel.layout import layout_of
from trainer.train.dry_run import resolved
from trainer.train.process import decide_threads, rank, report_end, run


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        runs = load_runs(options.config, _overrides(options), only=options.run)
        if options.profile:
            runs = {name: _profiled(settings) for name, settings in runs.items()}
        for name, settings in runs.items():
            _check(settings, name if len(runs) > 1 else None)
        check_directories([settings.metrics for settings in runs.values()])
    except ConfigurationError as error:
        sys.stderr.write(f"{visible(str(error))}\n")
        return report_end(error)
    warnings = [(name, each) for name, settings in runs.items() for each in algorithm_warnings(settings.algorithm)]
    if options.dry_run:
        for _, each in warnings:
            sys.stderr.write(f"warning: {visible(each)}\n")
        sys.stdout.write(f"{json.dumps(resolved(runs), indent=2)}\n")
        return 0
    log.configure(next(iter(runs.values())).log_level)
    for name, each in warnings if rank() == 0 else ():
        structlog.get_logger("trainer").warning("a part of the algorithm cannot act", run=name, reason=each)
    return run(runs)


def _profiled(settings: TrainerSettings) -> TrainerSettings:
    if settings.profile.steps:
        return settings
    return settings.model_copy(update={"profile": settings.profile.model_copy(update={"steps": 3})})


def _check(settings: TrainerSettings, name: str | None) -> None:
    """Check everything that is known before a model is loaded. Raises ConfigurationError; it names the run if there
    are several (`name`)."""
    try:
        algorithm = resolve(settings.algorithm)
        check_teacher(settings.teacher, algorithm)
        check_reference(settings.reference, algorithm)
        if algorithm.user_functions:
            decide_threads(settings.threads)
            from trainer.algorithm.trial import try_functions  # it imports torch, which takes seconds

            try_functions(algorithm)
        settings.optimizer.check_end()
        check_installed(settings.metrics.sinks)
        layout = layout_of(settings)
        if layout is not None and settings.nproc is not None:
            layout.check_world(settings.nproc, asked=True)
    except ConfigurationError as error:
        raise ConfigurationError(f"run {name}: {error}" if name is not None else str(error)) from error


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
