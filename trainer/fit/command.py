"""`base-rl fit`, or `python -m trainer fit sft|dpo|kto|reward-model [--config FILE] [--from PATH] [--data FILE] …`

Reads sessions or preferences of the run from the proxy, from what `base-rl export` wrote, or rows of files, and fits
the newest weights to them. `sft`, `dpo` and `kto` make the run's next version; `reward-model` writes a directory. It
needs the run's trainer key or an admin key, and the weights under the same paths as the trainer.

Exit status: 0; 1 where it cannot go on; 2 for a wrong configuration; 130 after Ctrl-C or SIGTERM, when nothing was
left half done.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import structlog

from proxy.contract.step import Fit
from proxy.contract.visible import visible
from trainer import log
from trainer.config import Configuration, TrainerSettings
from trainer.errors import ConfigurationError, HeadMoved, TrainerError
from trainer.fit.options import KTO, RATES, REWARD_MODEL, SFT, check, overrides_of, parse
from trainer.observe.metrics.sinks import check_installed
from trainer.proxy_client import ProxyClient

if TYPE_CHECKING:
    from proxy.contract.policy import Head
    from trainer.fit.fitting import Course, Figures, Objective, Progress
    from trainer.fit.reading import Found
    from trainer.models.policy import Policy
    from trainer.parallel.mesh import Ranks

CANNOT, WRONG, INTERRUPTED = 1, 2, 130
_log = structlog.get_logger("trainer.fit")


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        check(options)
        configuration = Configuration(options.config, overrides_of(options))
        settings = configuration.alone()
        check_installed(settings.metrics.sinks)
        log.configure(settings.log_level)
        outcome = _fit(options, settings, configuration)
    except KeyboardInterrupt:
        sys.stderr.write("ended by a signal: nothing was made\n")
        return INTERRUPTED
    except ConfigurationError as error:
        sys.stderr.write(f"{visible(str(error))}\n")
        return WRONG
    except HeadMoved as error:
        sys.stderr.write(
            f"nothing was made: {visible(str(error))}. A trainer makes versions of this run; pause the run (POST"
            " /api/v1/runs/RUN/pause) or stop its trainer, and fit again\n"
        )
        return CANNOT
    except TrainerError as error:
        sys.stderr.write(f"nothing was made: {visible(str(error))}\n")
        return CANNOT
    sys.stdout.write(f"{json.dumps(outcome) if options.json else visible(describe(outcome))}\n")
    return 0


def _fit(options: argparse.Namespace, settings: TrainerSettings, configuration: Configuration) -> dict[str, Any]:
    """Fit, and return the result for people and for programs.

    torch is imported here, because it reads its number of threads when it is imported.
    """
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    import torch

    from trainer.fit.reading import read
    from trainer.loading import load_learnt
    from trainer.models.huggingface import resolve_directory
    from trainer.parallel.mesh import join
    from trainer.publish.transports import publisher_of

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    rate = RATES[options.kind] if options.learning_rate is None else options.learning_rate
    with ExitStack() as ending:
        client = ProxyClient(settings.proxy_url, settings.api_key.get_secret_value(), settings.run)
        ending.callback(client.close)
        ranks = join(settings.device, offload=settings.offload)
        ending.callback(ranks.leave)
        head = client.head()
        settings = configuration.alone(head)
        settings = settings.model_copy(
            update={"optimizer": settings.optimizer.model_copy(update={"learning_rate": rate})}
        )
        base = resolve_directory(head.base_model)
        seed = settings.seed + head.version
        if options.kind == REWARD_MODEL:
            return _reward_model(options, settings, client, head, base, seed, ranks.device)
        model = load_learnt(base, settings, ranks)
        publisher = publisher_of(settings.weights, base, model, proxy_url=settings.proxy_url)
        ending.callback(publisher.close)
        for name in publisher.collect(head):
            _log.info("what an earlier process left uncommitted is removed", directory=name)
        state = publisher.restore(head, model)
        found = read(options, client, head, base, model.vocabulary)
        if options.dry_run:
            return _summary(options, settings, head, found)
        began = time.perf_counter()
        objective = _objective(options, settings, head, base, model, ranks, found)
        course, before, after = _train(options, settings, head, model, objective, found, seed)
        metrics = _metrics(course, before, after, found, time.perf_counter() - began)
        from trainer.fit.publishing import publish

        fit = _record(options, settings, found, course)
        made = publish(settings, ranks, client, publisher, head, model, state, metrics, fit, seed)
        weights = made.weights.uri if made.weights is not None else None
        return {**_summary(options, settings, head, found), **metrics, "version": made.version, "weights": weights}


def _objective(
    options: argparse.Namespace,
    settings: TrainerSettings,
    head: Head,
    base: Path,
    model: Policy,
    ranks: Ranks,
    found: Found,
) -> Objective[Any]:
    """Return the objective of the examples, with the log-probabilities of the reference if it needs them."""
    from trainer.fit.fitting import Imitation, Preferences
    from trainer.fit.rendering import context_of
    from trainer.fit.unpaired import Unpaired

    if options.kind == SFT:
        return Imitation(model, settings.batch, ranks.device)
    everything = [*found.learnt, *found.held_out]
    _log.info("asking the reference", examples=len(everything))
    if options.kind == KTO:
        unpaired = Unpaired(
            model,
            settings.batch,
            ranks.device,
            beta=options.beta,
            desirable_weight=options.desirable_weight,
            undesirable_weight=options.undesirable_weight,
            context=context_of(head, base),
        )
        unpaired.remember(everything)
        return unpaired
    preferences = Preferences(
        model, settings.batch, ranks.device, options.loss, options.beta, options.label_smoothing
    )
    preferences.remember(everything)
    return preferences


def _reward_model(
    options: argparse.Namespace,
    settings: TrainerSettings,
    client: ProxyClient,
    head: Head,
    base: Path,
    seed: int,
    device: Any,
) -> dict[str, Any]:
    import msgspec

    from trainer.fit.fitting import Ranking
    from trainer.fit.reading import read
    from trainer.fit.reward_model import load_reward_model, save_reward_model
    from trainer.publish.transports import fetch_version

    fetch_version(settings.weights, head.weights)
    model = load_reward_model(head, base, settings.precision, seed, settings.weights.directory).to(device)
    found = read(options, client, head, base, model.vocabulary)
    options_used = _summary(options, settings, head, found)
    if options.dry_run:
        return options_used
    began = time.perf_counter()
    objective = Ranking(model, settings.batch, device)
    course, before, after = _train(options, settings, head, model, objective, found, seed)
    metrics = _metrics(course, before, after, found, time.perf_counter() - began)
    fit = msgspec.to_builtins(_record(options, settings, found, course))
    about = {"run": head.run_name, "version": head.version, "metrics": metrics, "fit": fit}
    save_reward_model(model.cpu(), base, options.output, about)
    return {**options_used, **metrics, "output": str(options.output)}


def _train(
    options: argparse.Namespace,
    settings: TrainerSettings,
    head: Head,
    model: Any,
    objective: Objective[Any],
    found: Found,
    seed: int,
) -> tuple[Course, Figures, Figures]:
    """Train, and return the course of it with the figures of held-out items before and after."""
    from trainer.fit.curve import Curve
    from trainer.fit.fitting import train

    def report(progress: Progress) -> None:
        _log.info(
            "fit",
            epoch=f"{progress.epoch}/{options.epochs}",
            step=f"{progress.step}/{progress.of}",
            loss=round(progress.loss, 5),
            gradient_norm=round(progress.gradient_norm, 4),
        )
        curve.went_on(progress)

    with closing(Curve(settings, head, options.kind, _chosen_options(options, settings))) as curve:
        before = objective.evaluate(found.held_out) if found.held_out else {}
        curve.evaluated(before)
        course = train(
            model,
            objective,
            found.learnt,
            settings.optimizer,
            epochs=options.epochs,
            batch=options.batch,
            seed=seed,
            report=report,
        )
        after = objective.evaluate(found.held_out) if found.held_out else {}
        curve.evaluated(after)
    return course, before, after


def _metrics(course: Course, before: Figures, after: Figures, found: Found, seconds: float) -> dict[str, float]:
    return {
        "loss": course.loss,
        "gradient_norm": course.gradient_norm,
        "learning_rate": course.learning_rate,
        "skipped_steps": float(course.skipped),
        "fitted": float(len(found.learnt)),
        "held_out": float(len(found.held_out)),
        **{f"held_out_{name}_before": value for name, value in before.items()},
        **{f"held_out_{name}": value for name, value in after.items()},
        "seconds_fit": seconds,
    }


def _record(options: argparse.Namespace, settings: TrainerSettings, found: Found, course: Course) -> Fit:
    from trainer.fit.records import preferences_in, sessions_in

    return Fit(
        kind=options.kind,
        options={**_chosen_options(options, settings), "held_out_examples": len(found.held_out)},
        sessions=() if found.files else sessions_in(found.learnt),
        preferences=() if found.files else preferences_in(found.learnt),
        epochs=options.epochs,
        steps=course.steps,
        files=found.files,
    )


def _chosen_options(options: argparse.Namespace, settings: TrainerSettings) -> dict[str, Any]:
    """Return the options that select what is learnt, and how."""
    chosen = ("epochs", "batch", "held_out", "since", "until", "version", "min_reward", "task", "source", "threshold")
    losses = ("loss", "beta", "label_smoothing", "desirable_weight", "undesirable_weight")
    options_used = {name: getattr(options, name) for name in (*chosen, *losses) if name in options}
    options_used["learning_rate"] = settings.optimizer.learning_rate
    if options.from_ is not None:
        options_used["from"] = options.from_.name
    return {name: value for name, value in options_used.items() if value is not None}


def _summary(options: argparse.Namespace, settings: TrainerSettings, head: Head, found: Found) -> dict[str, Any]:
    return {
        "kind": options.kind,
        "run": head.run_name,
        "from_version": head.version,
        "learning_rate": settings.optimizer.learning_rate,
        "fitted": len(found.learnt),
        "held_out": len(found.held_out),
        "dropped": sum(found.dropped.values()),
        "dropped_because": dict(found.dropped),
        "files": [file.name for file in found.files],
    }


def describe(outcome: dict[str, Any]) -> str:
    """Describe the result for people."""
    from trainer.fit.reading import named

    what = named(outcome["kind"], of_files=bool(outcome["files"]))
    if outcome["files"]:
        what += f" of {', '.join(outcome['files'])}"
    counts = f"{int(outcome['fitted'])} {what}, {int(outcome['held_out'])} held out, {outcome['dropped']} left out"
    if outcome["dropped"]:
        counts += f" ({', '.join(f'{count} {reason}' for reason, count in outcome['dropped_because'].items())})"
    if "loss" not in outcome:
        return f"{outcome['kind']} of {outcome['run']} would go on from version {outcome['from_version']}: {counts}"
    made = f"version {outcome['version']} of {outcome['run']}" if "version" in outcome else outcome["output"]
    rows = [("learnt from", counts), ("loss", f"{outcome['loss']:.6g} in the last epoch")]
    for name in ("loss", "accuracy", "margin"):
        if f"held_out_{name}" in outcome:
            change = f"{outcome[f'held_out_{name}_before']:.6g} before, {outcome[f'held_out_{name}']:.6g} after"
            rows.append((f"held-out {name}", change))
    if "weights" in outcome:
        rows.append(("weights", outcome["weights"]))
    lines = [f"{made}: {outcome['kind']} from version {outcome['from_version']}"]
    lines += [f"  {label:<18}{said}" for label, said in rows]
    return "\n".join(lines)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
