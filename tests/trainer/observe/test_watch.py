from __future__ import annotations

import msgspec
import pytest
import structlog

from tests.trainer.tiny import trajectory, turn
from trainer.algorithm.advantages import Advantages, assign
from trainer.algorithm.presets import PRESETS
from trainer.algorithm.running import RunningMeans
from trainer.observe.watch import GroupWatch


def compared(preset: str, *, task: str | None = None, grouped: bool = False) -> Advantages:
    members = [trajectory(turn([4]), reward=reward) for reward in (0.0, 1.0)]
    members = [msgspec.structs.replace(member, task=task) for member in members]
    return assign(members, [0, 0] if grouped else [0, 1], PRESETS[preset], RunningMeans.fresh(0.9))


def warnings_after(preset: str, batches: list[Advantages]) -> int:
    watch = GroupWatch(PRESETS[preset].baseline)
    with structlog.testing.capture_logs() as logs:
        for each in batches:
            watch.compared(each)
    return sum(entry["log_level"] == "warning" for entry in logs)


@pytest.mark.parametrize(("preset", "warned"), [("grpo", 1), ("rloo", 1), ("reinforce_pp", 0), ("ppo", 0)])
def test_traffic_without_groups_and_tasks_causes_one_warning(preset: str, warned: int) -> None:
    assert warnings_after(preset, [compared(preset)] * 2) == 0
    assert warnings_after(preset, [compared(preset)] * 9) == warned


def test_groups_or_tasks_cause_no_warning() -> None:
    lone, grouped, named = compared("grpo"), compared("grpo", grouped=True), compared("grpo", task="a")
    assert warnings_after("grpo", [lone, lone, grouped, lone, lone, named] * 2) == 0
    assert warnings_after("grpo", [lone] * 3 + [grouped] + [lone] * 3) == 2


def test_batches_without_rewards_cause_no_warning() -> None:
    nothing = assign([], [], PRESETS["grpo"], RunningMeans.fresh(0.9))
    assert warnings_after("grpo", [nothing] * 9) == 0
