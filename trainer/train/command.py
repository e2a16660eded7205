"""`python -m trainer --config FILE [--run NAME]… [--runs NAMES|all] [--proxy URL] [--set SECTION.KEY=VALUE]…
[--profile] [--dry-run]` trains runs until it is ended.

`base-rl train` starts as many processes as configured (`trainer/launch/local.py`), and so does torchrun:
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

from proxy.contract.policy import Head
from proxy.contract.visible import visible
from trainer import log
from trainer.algorithm.contradictions import check_reference, check_teacher
from trainer.algorithm.presets import resolve
from trainer.algorithm.presets import warnings as algorithm_warnings
from trainer.config import Configuration, TrainerSettings, merge, parse_assignment
from trainer.errors import ConfigurationError
from trainer.observe.metrics.sinks import check_directories, check_installed
from trainer.parallel.layout import layout_of
from trainer.rotation.plan import Plan
from trainer.train.dry_run import resolved
from trainer.train.process import decide_threads, rank, report_end, run

ALL = "all"
"""The value of `--runs` that stands for all active runs of the proxy."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        plan = _plan(options)
        several = plan.takes_turns
        configured = plan.runs or {plan.process.run: plan.process}
        for name, settings in configured.items():
            _check(settings, name if several else None)
        check_directories([settings.metrics for settings in configured.values()])
    except ConfigurationError as error:
        sys.stderr.write(f"{visible(str(error))}\n")
        return report_end(error)
    warnings = [
        (name, each) for name, settings in configured.items() for each in algorithm_warnings(settings.algorithm)
    ]
    if options.dry_run:
        for _, each in warnings:
            sys.stderr.write(f"warning: {visible(each)}\n")
        values = resolved(configured)
        sys.stdout.write(f"{json.dumps({**values, 'run': None} if plan.follows else values, indent=2)}\n")
        return 0
    log.configure(plan.process.log_level)
    for name, each in warnings if rank() == 0 else ():
        structlog.get_logger("trainer").warning("a part of the algorithm cannot act", run=name, reason=each)
    return run(plan)


def _plan(options: argparse.Namespace) -> Plan:
    """Return what the options ask for. Raises ConfigurationError."""
    configuration = Configuration(options.config, _overrides(options))
    profiled = _profiled if options.profile else lambda settings: settings
    names, follows = _chosen(options)
    runs = {} if follows else {name: profiled(each) for name, each in configuration.runs(names).items()}

    def resolved_with(name: str, head: Head) -> TrainerSettings:
        settings = profiled(configuration.of_run(name, head))
        # Settings that nobody has checked before a model is loaded: those of a run that came later, or of a table.
        if settings != runs.get(name):
            _check(settings, name)
        return settings

    return Plan(
        runs=runs,
        process=next(iter(runs.values()), None) or profiled(configuration.alone()),
        follows=follows,
        settings=lambda name: profiled(configuration.of_run(name)),
        resolved=resolved_with,
    )


def _chosen(options: argparse.Namespace) -> tuple[list[str], bool]:
    """Return the runs that the options name, and whether they ask for all active ones. Raises ConfigurationError."""
    names = [*options.run, *(name.strip() for text in options.runs for name in text.split(","))]
    if "" in names:
        raise ConfigurationError('--runs: write names with commas between them, or "all"')
    follows = ALL in names[len(options.run) :]
    if follows and len(names) > 1:
        raise ConfigurationError(f"--runs all stands for every active run of the proxy; remove {', '.join(names)}")
    return ([], True) if follows else (list(dict.fromkeys(names)), False)


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
    parser.add_argument(
        "--runs",
        action="append",
        default=[],
        metavar="NAMES",
        help='names of several runs with commas between them, or "all": all active runs of the proxy',
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
