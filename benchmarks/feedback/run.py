"""One run: a policy that attempts problems, feedback on its sessions, and the trainer that learns from it.

No service is around it: the policy is sampled in this process. Hints are made by the proxy's own code, batches and
steps by the trainer's.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from agents_examples.calculator.tasks import random_problem, score
from benchmarks.feedback.judged import Compared, FollowedUp
from benchmarks.feedback.texts import text_about
from benchmarks.learning.run import claim_of
from benchmarks.learning.tasks import Attempted, Calculator
from proxy.claims.hints import HintMaker
from proxy.contract.trajectory import Trajectory, TrajectoryGroup
from proxy.lifecycle.texts import FeedbackEntry
from proxy.settings import TextSettings
from proxy.tokens.template import ChatTemplate
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.preparation import prepare
from trainer.config import TrainerSettings
from trainer.loading import load_reference, load_trained
from trainer.parallel.mesh import Ranks
from trainer.update import Learner

Kind = Literal["words", "words_shuffled", "numbers", "relative", "follow_up"]
KINDS: tuple[Kind, ...] = ("words", "words_shuffled", "numbers", "relative", "follow_up")

GOAL = 0.85
WINDOW = 4
"""Number of batches that a reported mean covers."""
SESSIONS = 128
"""Sessions of a batch. Each attempts a problem of its own, and none belongs to a group, except for `relative`."""
STEPS = 28


@dataclass(frozen=True, kw_only=True)
class Run:
    kind: Kind
    seed: int
    steps: int = STEPS
    sessions: int = SESSIONS


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The mean reward of each batch, in order, from 0 to 1. The last batch follows the last step."""

    rewards: tuple[float, ...]

    @property
    def first(self) -> float:
        """The mean of the first batch, which is drawn from the model as it was made."""
        return self.rewards[0]

    @property
    def last(self) -> float:
        return statistics.fmean(self.rewards[-WINDOW:])

    @property
    def steps_to_goal(self) -> int | None:
        """The number of steps before the first `WINDOW` batches whose mean reached the goal had ended."""
        for end in range(WINDOW, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[end - WINDOW : end]) >= GOAL:
                return end - 1
        return None


class Commented(Calculator):
    """The calculator's agent as live traffic, whose sessions get a text, another session's text, or a number."""

    def __init__(self, run: Run, base: Path) -> None:
        from transformers import AutoTokenizer

        self._run = run
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self._hints = HintMaker(ChatTemplate.load(str(base)), TextSettings())

    def attempt(self, model: Any, rng: random.Random, generator: torch.Generator, version: int) -> Attempted:
        problems = [random_problem(rng) for _ in range(self._run.sessions)]
        attempts = self.conversations(problems, model, generator, version)
        scores = [score(attempt.problem, attempt.answer or "") for attempt in attempts]
        texts = [text_about(problem, reward, rng) for problem, reward in zip(problems, scores, strict=True)]
        if self._run.kind == "words_shuffled":
            rng.shuffle(texts)
        numbers = self._run.kind == "numbers"
        found = [
            attempt.recorded.finished(None, reward if numbers else None)
            for attempt, reward in zip(attempts, scores, strict=True)
        ]
        if not numbers:
            found = [self._described(each, text) for each, text in zip(found, texts, strict=True)]
        return Attempted([TrajectoryGroup(id=None, trajectories=(each,)) for each in found], scores)

    def _described(self, trajectory: Trajectory, text: str) -> Trajectory:
        entry = FeedbackEntry(
            id="txt", turn_id=None, text=text, source="script", after_training=False, created_at=0.0
        )
        return self._hints.with_hints(trajectory, [entry])


def learn(run: Run, base: Path) -> Curve:
    """Train for `run.steps` steps from the model in `base`."""
    torch.set_num_threads(1)
    hindsight = {"hindsight_coefficient": 1.0} if run.kind in {"words", "words_shuffled"} else {}
    settings = TrainerSettings.model_validate(
        {
            "batch": {"trajectories": run.sessions, "max_staleness": 0},
            "algorithm": hindsight,
            "optimizer": {"learning_rate": Calculator.learning_rate},
        }
    )
    task, algorithm = _task(run, base), resolve(settings.algorithm)
    alone = Ranks(0, 1, torch.device("cpu"), None)
    model: Any = load_trained(base, settings, alone)
    reference = load_reference(base, settings, alone) if algorithm.has_reference else None
    learner = Learner(model, algorithm, settings.optimizer, alone, reference)
    means = RunningMeans.fresh(algorithm.running_mean_decay)
    rng, generator = random.Random(run.seed), torch.Generator().manual_seed(run.seed)
    rewards: list[float] = []
    for version in range(run.steps):
        groups, scores = task.attempt(model.inner, rng, generator, version)
        rewards.append(statistics.fmean(scores))
        prepared = prepare(claim_of(groups, version), version, settings.batch, algorithm, means, model.vocabulary)
        means = prepared.advantages.means
        if not prepared.has_signal:
            continue
        torch.manual_seed(run.seed + version)
        hinted = prepared.hinted(settings.batch, algorithm)
        learner.update(prepared.packed(settings.batch, algorithm), None, hinted)
    rewards.append(statistics.fmean(task.attempt(model.inner, rng, generator, run.steps).scores))
    return Curve(rewards=tuple(rewards))


def _task(run: Run, base: Path) -> Calculator:
    if run.kind not in JUDGED:
        return Commented(run, base)
    from transformers import AutoTokenizer

    return JUDGED[run.kind](run.sessions, run.seed, AutoTokenizer.from_pretrained(base))


JUDGED: dict[str, type[Compared | FollowedUp]] = {"relative": Compared, "follow_up": FollowedUp}
"""The kinds whose rewards come from the proxy's judges. They begin with the demo's checkpoint: no message of
feedback has to be understood."""


def figures(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return the figures of one kind, as lists over the seeds."""
    return {
        "first": [round(curve.first, 3) for curve in curves],
        "last": [round(curve.last, 3) for curve in curves],
        "highest": [round(max(curve.rewards), 3) for curve in curves],
        "steps_to_085": [curve.steps_to_goal for curve in curves],
        "rewards": [[round(reward, 3) for reward in curve.rewards] for curve in curves],
    }
