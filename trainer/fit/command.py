"""`base-rl fit`, or `python -m trainer fit sft|dpo|reward-model [--config FILE] [--from PATH] …`

Reads sessions or preferences of the run from the proxy, or from what `base-rl export` wrote, and fits the newest
weights to them. `sft` and `dpo` make the run's next version; `reward-model` writes a directory. It needs the run's
trainer key or an admin key, and the weights under the same paths as the trainer.

Exit status: 0; 1 where it cannot go on; 2 for a wrong configuration; 130 after Ctrl-C or SIGTERM, when there is
nothing that was half done.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import structlog

from proxy.contract.step import Fit
from proxy.contract.visible import visible
from trainer import log
from trainer.config import TrainerSettings, load_settings
from trainer.errors import ConfigurationError, HeadMoved, NothingToFit, TrainerError
from trainer.fit.options import RATES, REWARD_MODEL, SFT, check, overrides_of, parse
from trainer.metrics.sinks import check_installed
from trainer.proxy_client import ProxyClient

if TYPE_CHECKING:
    from proxy.contract.policy import Head
    from trainer.fit.fitting import Course, Figures, Objective, Progress
    from trainer.fit.records import Selection

CANNOT, WRONG, INTERRUPTED = 1, 2, 130
_log = structlog.get_logger("trainer.fit")


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        check(options)
        settings = load_settings(options.config, overrides_of(options))
        check_installed(settings.metrics.sinks)
        log.configure(settings.log_level)
        outcome = _fit(options, settings)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """`learnt` and `held_out` are all examples, or all pairs."""

    learnt: Sequence[Any]
    held_out: Sequence[Any]
    dropped: int


def _fit(options: argparse.Namespace, settings: TrainerSettings) -> dict[str, Any]:
    """What was done, for people and for programs. torch is imported here, after its threads are decided."""
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    import torch

    from trainer.loading import load_learnt
    from trainer.models.huggingface import resolve_directory
    from trainer.parallel.mesh import join
    from trainer.weights.disk import DiskPublisher

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    rate = RATES[options.kind] if options.learning_rate is None else options.learning_rate
    settings = settings.model_copy(
        update={"optimizer": settings.optimizer.model_copy(update={"learning_rate": rate})}
    )
    with ExitStack() as ending:
        client = ProxyClient(settings.proxy_url, settings.api_key.get_secret_value(), settings.run)
        ending.callback(client.close)
        ranks = join(settings.device, offload=settings.offload)
        ending.callback(ranks.leave)
        head = client.head()
        base = resolve_directory(head.base_model)
        seed = settings.seed + head.version
        if options.kind == REWARD_MODEL:
            return _reward_model(options, settings, client, head, base, seed, ranks.device)
        model = load_learnt(base, settings, ranks)
        publisher = DiskPublisher(settings.weights.directory, base, settings.weights.keep_optimizer_states, model)
        ending.callback(publisher.close)
        for name in publisher.collect(head):
            _log.info("what an earlier process left uncommitted is removed", directory=name)
        state = publisher.restore(head, model)
        found = _read(options, client, model.vocabulary)
        if options.dry_run:
            return _told(options, settings, head, found)
        objective: Objective[Any]
        if options.kind == SFT:
            from trainer.fit.fitting import Imitation

            objective = Imitation(model, settings.batch, ranks.device)
        else:
            from trainer.fit.fitting import Preferences

            objective = Preferences(
                model, settings.batch, ranks.device, options.loss, options.beta, options.label_smoothing
            )
            objective.remember([*found.learnt, *found.held_out])
        began = time.perf_counter()
        course, before, after = _train(options, settings, head, model, objective, found, seed)
        metrics = _metrics(course, before, after, found, time.perf_counter() - began)
        from trainer.fit.publishing import publish

        fit = _record(options, settings, found, course)
        made = publish(settings, ranks, client, publisher, head, model, state, metrics, fit, seed)
        weights = made.weights.uri if made.weights is not None else None
        return {**_told(options, settings, head, found), **metrics, "version": made.version, "weights": weights}


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
    from trainer.fit.reward_model import load_reward_model, save_reward_model

    model = load_reward_model(head, base, settings.precision, seed, settings.weights.directory).to(device)
    found = _read(options, client, model.vocabulary)
    told = _told(options, settings, head, found)
    if options.dry_run:
        return told
    began = time.perf_counter()
    objective = Ranking(model, settings.batch, device)
    course, before, after = _train(options, settings, head, model, objective, found, seed)
    metrics = _metrics(course, before, after, found, time.perf_counter() - began)
    fit = msgspec.to_builtins(_record(options, settings, found, course))
    about = {"run": head.run_name, "version": head.version, "metrics": metrics, "fit": fit}
    save_reward_model(model.cpu(), base, options.output, about)
    return {**told, **metrics, "output": str(options.output)}


def _read(options: argparse.Namespace, client: ProxyClient, vocabulary: int) -> _Found:
    """Raises NothingToFit where there is too little."""
    from trainer.fit.records import Selection, examples_of, held_out, lines_of, pairs_of

    named = {name: getattr(options, name, None) for name in ("version", "min_reward", "task", "source")}
    chosen = tuple(options.session) if getattr(options, "session", None) else None
    selection = Selection(since=options.since, until=options.until, sessions=chosen, **named)
    lines = _from_proxy(options, client, selection) if options.from_ is None else lines_of(options.from_)
    learnt: Sequence[Any]
    rest: Sequence[Any]
    if options.kind == SFT:
        sessions = examples_of(lines, selection, vocabulary)
        dropped, (learnt, rest) = sessions.dropped, held_out(sessions.examples, options.held_out)
    else:
        pairs = pairs_of(lines, selection, vocabulary, last_alone=options.kind == REWARD_MODEL)
        dropped, (learnt, rest) = pairs.dropped, held_out(pairs.pairs, options.held_out)
    what = "sessions" if options.kind == SFT else "preferences"
    if dropped:
        _log.warning(f"{what} that cannot be learnt from are left out: no tokens, or not the model's", count=dropped)
    if not learnt:
        raise NothingToFit(f"no {what} to learn from were found with these filters ({dropped} cannot be learnt from)")
    return _Found(learnt=learnt, held_out=rest, dropped=dropped)


def _from_proxy(options: argparse.Namespace, client: ProxyClient, selection: Selection) -> Iterator[bytes]:
    of_sessions = options.kind == SFT
    path = "/export" if of_sessions else "/export/preferences"
    return client.lines(path, selection.query(of_sessions=of_sessions))


def _train(
    options: argparse.Namespace,
    settings: TrainerSettings,
    head: Head,
    model: Any,
    objective: Objective[Any],
    found: _Found,
    seed: int,
) -> tuple[Course, Figures, Figures]:
    """The course, and how the model did on what was held out, before and after."""
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

    with closing(Curve(settings, head, options.kind, _options_told(options, settings))) as curve:
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


def _metrics(course: Course, before: Figures, after: Figures, found: _Found, seconds: float) -> dict[str, float]:
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


def _record(options: argparse.Namespace, settings: TrainerSettings, found: _Found, course: Course) -> Fit:
    from trainer.fit.records import preferences_in, sessions_in

    return Fit(
        kind=options.kind,
        options={**_options_told(options, settings), "held_out_examples": len(found.held_out)},
        sessions=sessions_in(found.learnt),
        preferences=preferences_in(found.learnt),
        epochs=options.epochs,
        steps=course.steps,
    )


def _options_told(options: argparse.Namespace, settings: TrainerSettings) -> dict[str, Any]:
    """Those that say what is learnt, and how."""
    names = ("epochs", "batch", "held_out", "since", "until", "version", "min_reward", "task", "source")
    told = {name: getattr(options, name) for name in (*names, "loss", "beta", "label_smoothing") if name in options}
    told["learning_rate"] = settings.optimizer.learning_rate
    if options.from_ is not None:
        told["from"] = options.from_.name
    return {name: value for name, value in told.items() if value is not None}


def _told(options: argparse.Namespace, settings: TrainerSettings, head: Head, found: _Found) -> dict[str, Any]:
    return {
        "kind": options.kind,
        "run": head.run_name,
        "from_version": head.version,
        "learning_rate": settings.optimizer.learning_rate,
        "fitted": len(found.learnt),
        "held_out": len(found.held_out),
        "dropped": found.dropped,
    }


def describe(outcome: dict[str, Any]) -> str:
    """For people."""
    what = "sessions" if outcome["kind"] == SFT else "preferences"
    counts = f"{int(outcome['fitted'])} {what}, {int(outcome['held_out'])} held out, {outcome['dropped']} left out"
    if "loss" not in outcome:
        return f"{outcome['kind']} of {outcome['run']} would go on from version {outcome['from_version']}: {counts}"
    made = f"version {outcome['version']} of {outcome['run']}" if "version" in outcome else outcome["output"]
    lines = [f"{made}: {outcome['kind']} from version {outcome['from_version']}", f"  learnt from     {counts}"]
    lines.append(f"  loss            {outcome['loss']:.6g} in the last epoch")
    for name in ("loss", "accuracy", "margin"):
        if f"held_out_{name}" in outcome:
            change = f"{outcome[f'held_out_{name}_before']:.6g} before, {outcome[f'held_out_{name}']:.6g} after"
            lines.append(f"  held-out {name:<8}{change}".replace("held-out loss    ", "held-out loss  "))
    if "weights" in outcome:
        lines.append(f"  weights         {outcome['weights']}")
    return "\n".join(lines)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
