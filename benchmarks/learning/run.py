"""One run: a policy that acts some versions behind, and the trainer that learns from its attempts."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning.tasks import GROUPS, MEMBERS, TASKS, Task
from proxy.contract.claim import ClaimedBatch, SkipReason
from proxy.contract.identifiers import ClaimId
from proxy.contract.trajectory import TrajectoryGroup
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.preparation import prepare
from trainer.config import TrainerSettings
from trainer.loading import load_critic, load_reference, load_trained
from trainer.parallel.mesh import Ranks
from trainer.update import Learner

GOOD = 0.9
WINDOW = 4
"""Number of batches that a reported mean covers."""
AFTER = 12
"""Steps after the reward reached its goal, which show whether it stays there."""


@dataclass(frozen=True, kw_only=True)
class Run:
    task: str
    preset: str
    seed: int
    staleness: int


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The result of a run. `rewards` are means of batches, in order, each from 0 to 1. `steps_to_090` is the number
    of trained batches until the mean of `WINDOW` batches was 0.9, or None. `final` is the mean of the last `WINDOW`
    batches."""

    rewards: tuple[float, ...]
    steps_to_090: int | None
    final: float
    seconds: float = 0.0
    """Seconds of a core that the run took."""


def learn(run: Run) -> Curve:
    return learn_task(TASKS[run.task](), {"preset": run.preset}, seed=run.seed, staleness=run.staleness)


def learn_task(task: Task, algorithm_settings: dict[str, Any], *, seed: int, staleness: int) -> Curve:
    """Learn a task with these settings of `[trainer.algorithm]`, on one core."""
    torch.set_num_threads(1)
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="base-rl-learning-") as directory:
        base = task.prepare(Path(directory), seed)
        settings = TrainerSettings.model_validate(
            {
                "batch": {"trajectories": GROUPS * MEMBERS, "max_staleness": staleness},
                "algorithm": algorithm_settings,
                "optimizer": {"learning_rate": task.learning_rate},
            }
        )
        algorithm, alone = resolve(settings.algorithm), Ranks(0, 1, torch.device("cpu"), None)
        model = load_trained(base, settings, alone)
        actor: Any = load_reference(base, settings, alone).inner
        reference = load_reference(base, settings, alone) if algorithm.has_reference else None
        critic = load_critic(base, settings, alone) if algorithm.has_critic else None
    learner = Learner(model, algorithm, settings.optimizer, alone, reference, critic)
    means = RunningMeans.fresh(algorithm.running_mean_decay)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    behind: deque[dict[str, torch.Tensor]] = deque([copied_weights(model)], maxlen=staleness + 1)
    rewards: list[float] = []
    head, reached = 0, None
    for step in range(task.steps):
        actor.load_state_dict(behind[0], strict=False)
        groups, scores = task.attempt(actor, rng, generator, head - len(behind) + 1)
        rewards.append(statistics.fmean(scores))
        if reached is None and len(rewards) >= WINDOW and statistics.fmean(rewards[-WINDOW:]) >= GOOD:
            reached = step
        if reached is not None and step >= reached + AFTER:
            break
        claimed = claim_of(groups, head)
        prepared = prepare(claimed, head, settings.batch, algorithm, means, model.vocabulary)
        reasons = {reason for _, reason in prepared.dropped}
        assert reasons <= {SkipReason.TRUNCATED}, "trajectories that are dropped would not be as stale as was asked"
        means = prepared.advantages.means
        if prepared.advantages.all_zero or not prepared.batch.trajectories:
            continue
        torch.manual_seed(seed + step)
        learner.update(prepared.packed(settings.batch, algorithm))
        head += 1
        behind.append(copied_weights(model))
    return Curve(
        rewards=tuple(rewards),
        steps_to_090=reached,
        final=statistics.fmean(rewards[-WINDOW:]),
        seconds=round(time.process_time() - began, 1),
    )


def copied_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the model's weights by name."""
    return {name: weight.detach().clone() for name, weight in model.named_weights()}


def claim_of(groups: Sequence[TrajectoryGroup], version: int) -> ClaimedBatch:
    """Return the groups as the proxy would lease them to a trainer with this version."""
    return ClaimedBatch(claim_id=ClaimId("claim"), lease_expires_at=0.0, base_version=version, groups=tuple(groups))
