"""A whole step learns: trajectories are sampled from the published weights, and one kind of token is rewarded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from proxy.contract.trajectory import TrajectoryGroup
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.tiny import draw, group_of, load_tiny, settings, trajectory, turn

STEPS = 20


def bandit(
    base: Path, proxy: Callable[[], TrainingProxy], delay: int, shuffled: bool
) -> Callable[[int], TrajectoryGroup]:
    """Return groups of 8 that sample two tokens after a prompt; even second tokens are rewarded.

    The sampling weights are `delay` versions older than the head. `shuffled` assigns rewards at random.
    """
    model = load_tiny(base)
    generator = torch.Generator().manual_seed(0)
    loaded = -1

    def source(version: int) -> TrajectoryGroup:
        nonlocal loaded
        drawn_from = max(0, version - delay)
        if drawn_from != loaded:
            directory = Path(proxy().commits[drawn_from - 1].weights.uri) if drawn_from else base
            model.load_state_dict(load_tiny(directory).state_dict())
            loaded = drawn_from
        prompt = torch.randint(0, 64, (3,), generator=generator).tolist()
        drawn = draw(model, prompt, 2, generator, count=8)
        members = [turn(output, prompt=prompt, logprobs=logprobs, version=drawn_from) for output, logprobs in drawn]
        rewards = [float(output[1] % 2 == 0) for output, _ in drawn]
        if shuffled:
            rewards = [rewards[index] for index in torch.randperm(8, generator=generator).tolist()]
        return group_of([trajectory(node, reward=reward) for node, reward in zip(members, rewards, strict=True)])

    return source


def rewards_of(
    start: Start,
    base: Path,
    weights: Path,
    *,
    delay: int = 0,
    shuffled: bool = False,
    steps: int = STEPS,
    **algorithm: Any,
) -> list[float]:
    proxy = TrainingProxy(base_model=str(base))
    proxy.source = bandit(base, lambda: proxy, delay, shuffled)
    configured = settings(
        weights, batch={"trajectories": 128}, optimizer={"learning_rate": 1e-2}, algorithm={**algorithm}
    )
    trainer = start(proxy, configured)
    trainer.loop.resume()
    for _ in range(steps):
        trainer.loop.step()
    return [commit.step.metrics["reward_mean"] for commit in proxy.commits]


@pytest.mark.parametrize(("proximal", "delay"), [("recompute", 0), ("recompute", 2), ("loglinear", 2)])
def test_reward_rises(start: Start, tiny_model: Path, tmp_path: Path, proximal: str, delay: int) -> None:
    """Without a delay, both proximal policies equal the policy that sampled."""
    rewards = rewards_of(start, tiny_model, tmp_path, proximal=proximal, delay=delay)
    assert rewards[0] < 0.65
    assert sum(rewards[-3:]) / 3 > 0.9


def test_shuffled_rewards_teach_nothing(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    rewards = rewards_of(start, tiny_model, tmp_path, shuffled=True)
    assert sum(rewards[-3:]) / 3 < 0.7


def test_the_same_seed_gives_the_same_curve(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    curves = [rewards_of(start, tiny_model, tmp_path / name, steps=4) for name in ("first", "second")]
    assert curves[0] == curves[1]
