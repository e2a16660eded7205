"""The conditions that are compared, and a run of one of them."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.learning.run import Curve, learn_task
from benchmarks.ungrouped.traffic import Ungrouped

PRESET = "grpo"


class Condition(NamedTuple):
    """What the trainer compares a session with, and which share of its calls has shadow answers."""

    task_by: str = "name"
    share: float = 0.0
    samples: int = 0


CONDITIONS = {
    "running_mean": Condition(),
    "first_message": Condition(task_by="first_message"),
    "shadow_0.1": Condition(share=0.1, samples=3),
    "shadow_1.0": Condition(share=1.0, samples=3),
}
TRAFFIC = {"new_questions": False, "recurring_questions": True}


def learn(traffic: str, name: str, seed: int) -> Curve:
    """Learn this traffic under a condition."""
    condition = CONDITIONS[name]
    task = Ungrouped(recurring=TRAFFIC[traffic], share=condition.share, samples=condition.samples)
    settings = {"preset": PRESET, "task_by": condition.task_by}
    return learn_task(task, settings, seed=seed, staleness=0)
