"""One run: a policy acts through a wrong engine, the trainer learns from its records, and a correct engine
evaluates."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.run import claim_of, copied_weights
from benchmarks.learning.tasks import Calculator
from benchmarks.mismatch.engines import ENGINES, Engine
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.preparation import prepare
from trainer.config import Correction, MismatchSettings, TrainerSettings
from trainer.loading import load_reference, load_trained
from trainer.parallel.mesh import Ranks
from trainer.update import Learner

PRESET = "grpo"
CORRECTIONS: dict[str, Correction | None] = {
    "none": Correction.NONE,
    "default": None,
    "truncate": Correction.TRUNCATE,
    "mask": Correction.MASK,
    "sequence_truncate": Correction.SEQUENCE_TRUNCATE,
    "sequence_mask": Correction.SEQUENCE_MASK,
    "geometric_mask": Correction.GEOMETRIC_MASK,
}
"""Corrections by name; `default` is that of the preset."""
ON_A_CORRECT_ENGINE = ("none", "default")
"""Corrections that are also measured on a correct engine, where every ratio is 1 and all weights are equal."""
LEARNING_RATE = Calculator.learning_rate
STEPS = 40
JUDGED = 4
"""Number of batches in the final evaluation."""


@dataclass(frozen=True, kw_only=True)
class Run:
    fault: str
    correction: str
    seed: int
    steps: int = STEPS


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a run. `final` is the mean reward of the learnt weights on a correct engine, `acted` that of the
    wrong engine's last batches, `gap` the mean difference of log-probabilities over all steps, in nats per token.
    `paused` is the step after which a trainer with default settings pauses the run because of that difference, or
    None; the benchmark goes on."""

    final: float
    acted: float
    gap: float
    paused: int | None
    seconds: float


def learn(run: Run) -> Found:
    torch.set_num_threads(1)
    began = time.process_time()
    task = Calculator()
    base = task.prepare(Path(), run.seed)
    correction = CORRECTIONS[run.correction]
    settings = TrainerSettings.model_validate(
        {
            "batch": {"max_staleness": 0},
            "algorithm": {"preset": PRESET, **({} if correction is None else {"correction": correction})},
            "optimizer": {"learning_rate": LEARNING_RATE},
        }
    )
    algorithm, alone = resolve(settings.algorithm), Ranks(0, 1, torch.device("cpu"), None)
    model = load_trained(base, settings, alone)
    inner: Any = load_reference(base, settings, alone).inner
    engine = ENGINES[run.fault](inner, run.seed)
    learner = Learner(model, algorithm, settings.optimizer, alone)
    means = RunningMeans.fresh(algorithm.running_mean_decay)
    rng, generator = random.Random(run.seed), torch.Generator().manual_seed(run.seed)
    rewards: list[float] = []
    gaps: list[float] = []
    for step in range(run.steps):
        engine.load(copied_weights(model))
        groups, scores = task.attempt(engine, rng, generator, step)
        rewards.append(statistics.fmean(scores))
        prepared = prepare(claim_of(groups, step), step, settings.batch, algorithm, means, model.vocabulary)
        means = prepared.advantages.means
        if prepared.advantages.all_zero or not prepared.batch.trajectories:
            continue
        torch.manual_seed(run.seed + step)
        tokens = learner.update(prepared.packed(settings.batch, algorithm)).tokens
        assert tokens is not None
        gaps.append(float((tokens.logprobs_N - tokens.behaviour_N).abs().mean()))
    judge = Engine(inner, run.seed)
    judge.load(copied_weights(model))
    judged = [statistics.fmean(task.attempt(judge, rng, generator, run.steps)[1]) for _ in range(JUDGED)]
    return Found(
        final=statistics.fmean(judged),
        acted=statistics.fmean(rewards[-JUDGED:]),
        gap=statistics.fmean(gaps) if gaps else 0.0,
        paused=pause_of(gaps, settings.mismatch),
        seconds=round(time.process_time() - began, 1),
    )


def pause_of(gaps: Sequence[float], settings: MismatchSettings) -> int | None:
    """Return the number of the step after which the trainer's watch pauses a run with these gaps, from 1."""
    for step in range(settings.steps, len(gaps) + 1):
        if min(gaps[step - settings.steps : step]) > settings.pause_above:
            return step
    return None
