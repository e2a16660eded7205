"""Batches without a signal: their claims are held for the next version, and consumed exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from proxy.contract.trajectory import TrajectoryGroup
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.test_loop import equal_rewards, random_groups, same
from tests.trainer.tiny import cut, group_of, settings, trajectory, turn
from trainer.algorithm.running import RunningMeans
from trainer.claims.leased import MOST_KEPT


def test_a_batch_without_signal_waits_for_the_next_version(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=equal_rewards)
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    trainer.loop.step()
    assert proxy.commits == []
    assert len(proxy.leases) == 1
    proxy.source = random_groups()
    trainer.loop.step()
    (commit,) = proxy.commits
    assert commit.claim_ids == tuple(proxy.claimed)
    assert [audit.skipped for audit in commit.step.audit] == ["no_signal"] * 8 + [None] * 10
    assert commit.step.metrics["skipped_no_signal"] == 8
    assert set(proxy.consumed.values()) == {1}
    assert len(proxy.consumed) == 18


def test_the_number_of_held_claims_is_bounded(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model), source=equal_rewards)
    trainer = start(proxy, settings(tmp_path))
    trainer.loop.resume()
    before = trainer.weights()
    for _ in range(MOST_KEPT):
        trainer.loop.step()
    assert [len(commit.claim_ids) for commit in proxy.commits] == [MOST_KEPT]
    assert proxy.leases == {}
    assert same(trainer.weights(), before)
    assert trainer.learner.steps == 0


def test_a_gradient_that_is_not_finite_changes_no_weights(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    def poisonous(version: int) -> TrajectoryGroup:
        return group_of([trajectory(turn([4], version=version), reward=reward) for reward in (1e38, -1e38)])

    unscaled = {"scale": "none"}
    proxy = TrainingProxy(base_model=str(tiny_model), source=poisonous)
    trainer = start(proxy, settings(tmp_path, algorithm=unscaled, batch={"trajectories": 2}))
    trainer.loop.resume()
    before = trainer.weights()
    trainer.loop.step()
    assert same(trainer.weights(), before)
    assert trainer.learner.steps == 0
    assert proxy.commits == []
    proxy.source = random_groups()
    trainer.loop.step()
    assert [audit.skipped for audit in proxy.commits[0].step.audit][:2] == ["non_finite_gradient"] * 2
    assert all(torch.isfinite(weight).all() for weight in trainer.weights().values())


def test_a_lost_held_claim_discards_its_step(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """The running means include its rewards, and its trajectories will be trained again."""
    proxy = TrainingProxy(base_model=str(tiny_model), source=equal_rewards)
    trainer = start(proxy, settings(tmp_path, algorithm={"baseline": "running_mean", "scale": "none"}))
    proxy.source = lambda version: group_of([trajectory(turn([4], version=version), reward=0.0) for _ in range(8)])
    trainer.loop.resume()
    trainer.loop.step()
    (kept,) = proxy.leases
    fresh = trainer.loop.means
    assert (fresh.run.session.mean, fresh.run.session.weight > 0) == (0.0, True)
    trainer.leases.drop(kept)
    proxy.source = random_groups()
    trainer.loop.step()
    assert proxy.commits == []
    assert trainer.loop.means == RunningMeans.fresh(trainer.loop.means.decay)
    trainer.loop.step()
    assert set(proxy.consumed.values()) == {1}


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_a_batch_of_cut_answers_is_held(start: Start, tiny_model: Path, tmp_path: Path, preset: str) -> None:
    """A batch of cut answers is also held with a critic, which otherwise learns from every batch."""

    def source(version: int) -> TrajectoryGroup:
        return group_of([trajectory(cut(turn([6, 7], version=version)), reward=reward) for reward in (0.0, 1.0)])

    proxy = TrainingProxy(base_model=str(tiny_model), source=source)
    trainer = start(proxy, settings(tmp_path, batch={"trajectories": 2}, algorithm={"preset": preset}))
    trainer.loop.resume()
    before = trainer.weights()
    for _ in range(MOST_KEPT):
        trainer.loop.step()
    (commit,) = proxy.commits
    assert same(before, trainer.weights())
    assert {audit.skipped for audit in commit.step.audit} == {"truncated"}
    assert all(audit.masked for audit in commit.step.audit)
