"""`python -m trainer --config FILE [--run NAME] [--proxy URL] [--set SECTION.KEY=VALUE]… [--profile]
[--dry-run]`
`python -m trainer fit sft|dpo|reward-model …` fits to chosen sessions or to preferences (`trainer/fit/command.py`).
`python -m trainer replay RUN VERSION [--verify]` makes a past step again (`trainer/replay_command.py`).

`base-rl train` starts it in as many processes as are asked for (`trainer/launch.py`), and so does torchrun:
`torchrun --nproc-per-node 2 -m trainer --config FILE`. There, write `--set run=NAME` for `--run NAME`, which torchrun
takes for an option of its own.

SIGTERM and SIGINT end it cleanly wherever it is: claims are given back, the exit status is 0. A second one kills.
Exit status 2: the configuration is wrong; 1: it cannot go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from trainer import log
from trainer.algorithm.presets import Algorithm, resolve
from trainer.config import TrainerSettings, load_settings, merge, parse_assignment
from trainer.errors import ConfigurationError, TrainerError
from trainer.metrics.background import hanging
from trainer.metrics.sinks import check_installed
from trainer.parallel.layout import layout_of
from trainer.teacher import Teacher, check_told


class Interrupted(BaseException):
    """A signal asked for the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["replay"]:
        from trainer.replay_command import main as replay

        return replay(words[1:])
    if words[:1] == ["fit"]:
        from trainer.fit.command import main as fit

        return fit(words[1:])
    options = _parser().parse_args(words)
    try:
        settings = load_settings(options.config, _overrides(options))
        if options.profile and not settings.profile.steps:
            settings = settings.model_copy(update={"profile": settings.profile.model_copy(update={"steps": 3})})
        algorithm = resolve(settings.algorithm)
        check_told(settings.teacher, algorithm)
        check_installed(settings.metrics.sinks)
        layout_of(settings)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.dry_run:
        sys.stdout.write(f"{_resolved(settings, algorithm)}\n")
        return 0
    log.configure(settings.log_level)
    try:
        _listen()
        _train(settings, algorithm)
    except Interrupted:
        structlog.get_logger("trainer").info("ended by a signal")
    except TrainerError as error:
        structlog.get_logger("trainer").error("cannot go on", error=type(error).__name__, reason=str(error))
        return 2 if isinstance(error, ConfigurationError) else 1
    return 0


def _train(settings: TrainerSettings, algorithm: Algorithm) -> None:
    """Puts the parts together and trains until a signal. torch is imported here, after its threads are decided."""
    _check_processes(settings.nproc)
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    import torch

    from trainer.claims import ClaimsInHand, take_over
    from trainer.instruments import Instruments
    from trainer.leases import LeaseKeeper
    from trainer.loading import load_critic, load_reference, load_trained
    from trainer.loop import TrainingLoop
    from trainer.models.huggingface import resolve_directory
    from trainer.parallel.mesh import join
    from trainer.presence import Presence, new_process_name
    from trainer.proxy_client import ProxyClient
    from trainer.update import Learner
    from trainer.versions import Versions
    from trainer.weights.disk import DiskPublisher

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    ranks = join(settings.device, layout_of(settings))
    client = ProxyClient(settings.proxy_url, settings.api_key.get_secret_value(), settings.run)
    leases = LeaseKeeper(client)
    process = new_process_name()
    claims = ClaimsInHand(client, leases, settings.batch, settings.name, process)
    with ExitStack() as ending:
        for end in (ranks.leave, client.close, leases.stop):
            ending.callback(end)
        head = ranks.from_first(client.head)
        presence = Presence(settings.weights.directory / head.run_id / ".trainers", process)
        ending.callback(presence.leave)
        ending.callback(claims.give_back)
        ranks.from_first(lambda: take_over(presence, client))
        base = resolve_directory(head.base_model)
        model = load_trained(base, settings, ranks)
        reference = load_reference(base, settings, ranks) if algorithm.has_reference else None
        critic = load_critic(base, settings, ranks) if algorithm.has_critic else None
        learner = Learner(model, algorithm, settings.optimizer, ranks, reference, critic)
        teacher = Teacher(settings.teacher) if algorithm.has_teacher else None
        if teacher is not None:
            ending.callback(teacher.close)
            ranks.from_first(lambda: teacher.check(base))
        instruments = Instruments(settings, algorithm, ranks, base, head)
        ending.callback(instruments.close)
        publisher = DiskPublisher(settings.weights.directory, base, settings.weights.keep_optimizer_states)
        ending.callback(publisher.close)
        versions = Versions(settings, algorithm, ranks, client, claims, publisher, learner)
        TrainingLoop(
            settings.batch,
            algorithm,
            ranks,
            claims,
            versions,
            learner,
            instruments=instruments,
            sample=settings.audit.sample,
            pause_after=settings.optimizer.pause_after,
            teacher=teacher,
        ).run()


def _check_processes(wanted: int | None) -> None:
    """Raises ConfigurationError where there are more or fewer."""
    there = int(os.environ.get("WORLD_SIZE", "1"))
    if wanted is not None and wanted != there:
        raise ConfigurationError(
            f"trainer.nproc is {wanted}, and {there} {'process was' if there == 1 else 'processes were'} started:"
            f" `base-rl train --nproc {wanted}` starts as many"
        )


def _listen() -> None:
    """The first rank ends by an exception, which unwinds through the clean-up; the others just end."""
    if os.environ.get("RANK", "0") != "0":
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, interrupt)


def _resolved(settings: TrainerSettings, algorithm: Algorithm) -> str:
    values = settings.model_dump(mode="json")
    parts = {**dataclasses.asdict(algorithm), "reward": algorithm.reward.model_dump()}
    values["algorithm"] = {"preset": settings.algorithm.preset, **parts}
    return json.dumps(values, indent=2)


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for assignment in options.set:
        overrides = merge(overrides, parse_assignment(assignment))
    if options.run is not None:
        overrides["run"] = options.run
    if options.proxy is not None:
        overrides["proxy_url"] = options.proxy
    return overrides


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Trains a run's policy from its rewards.")
    parser.add_argument("--config", type=Path, help="the run's TOML file; its [trainer] section is read")
    parser.add_argument("--run", help="name of the run to train (trainer.run)")
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
    if hanging():
        os._exit(status)  # a sink had its time; what its library would do at the exit may take forever
    sys.exit(status)
