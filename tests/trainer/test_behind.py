"""Versions that are written and committed while the next step is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from proxy.contract.claim import CommitRequest
from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.test_loop import same
from tests.trainer.tiny import group_of, settings, trajectory, turn
from trainer.config import TrainerSettings
from trainer.errors import ConfigurationError, WeightsUnusable


def configured(directory: Path, **weights: Any) -> TrainerSettings:
    batch = {"trajectories": 4, "at_least": 4, "wait_seconds": 5.0, "max_staleness": 8}
    return settings(directory, batch=batch, weights={"behind": None, **weights})


def batches(proxy: TrainingProxy, count: int) -> None:
    """Offer batches of one group each, which depend on their number alone."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        outputs = torch.randint(0, 64, (4, 6), generator=generator).tolist()
        turns = [turn(output, logprobs=[-4.0] * 6, version=0) for output in outputs]
        proxy.offer([group_of([trajectory(each, reward=float(place % 2)) for place, each in enumerate(turns)])])


class CommitOrder:
    """Holds back each commit but the first until the trainer has claimed the batch after it, where there is one."""

    def __init__(self, proxy: TrainingProxy, batches: int) -> None:
        self.proxy, self.batches, self.commits = proxy, batches, 0
        proxy.before_commit = self

    def __call__(self) -> None:
        self.commits += 1
        if self.commits > 1:
            wanted = min(self.commits + 1, self.batches)
            self.proxy.wait_for(lambda: len(self.proxy.claimed) >= wanted)


def test_the_next_batch_is_trained_while_a_version_is_committed(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    at_once = TrainingProxy(base_model=str(tiny_model))
    batches(at_once, 4)
    sequential = start(at_once, configured(tmp_path / "a", behind=False))
    sequential.loop.resume()
    proxy = TrainingProxy(base_model=str(tiny_model))
    batches(proxy, 4)
    CommitOrder(proxy, 4)
    trainer = start(proxy, configured(tmp_path / "b"))
    trainer.loop.resume()
    heads = []
    for _ in range(4):
        sequential.loop.step()
        trainer.loop.step()
        heads.append(trainer.loop.head.version)
    trainer.parts.ending.close()
    assert heads == [1, 2, 3, 4]
    assert [commit.parent_version for commit in proxy.commits] == [0, 1, 2, 3]
    assert [each.weights.sha256 for each in proxy.commits] == [each.weights.sha256 for each in at_once.commits]
    assert list(proxy.consumed.values()) == list(at_once.consumed.values()) == [1] * 16
    audits = [[each.staleness_mean for each in commit.step.audit] for commit in proxy.commits]
    assert audits == [[each.staleness_mean for each in commit.step.audit] for commit in at_once.commits]


def test_a_refused_version_takes_the_next_step_with_it(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    batches(proxy, 3)
    trainer = start(proxy, configured(tmp_path))
    trainer.loop.resume()
    trainer.loop.step()
    first = trainer.weights()

    def moved() -> None:
        proxy.wait_for(lambda: len(proxy.claimed) >= 3)
        proxy.move_head(5, proxy.commits[0].weights)

    proxy.before_commit = moved
    trainer.loop.step()
    provisional = trainer.loop.head.version
    trainer.loop.step()
    assert (provisional, trainer.loop.head.version) == (2, 5)
    assert same(trainer.weights(), first)
    assert list(proxy.consumed.values()) == [1] * 4
    assert len(proxy.leases) == 0
    assert len([each for each in (tmp_path / "run_test").iterdir() if each.name.startswith("v")]) == 1


def test_a_version_that_cannot_be_written_ends_the_run_and_consumes_nothing(
    start: Start, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    batches(proxy, 3)
    trainer = start(proxy, configured(tmp_path))
    trainer.loop.resume()
    trainer.loop.step()
    (tmp_path / "run_test").rename(tmp_path / "away")
    (tmp_path / "run_test").write_text("no directory")
    trainer.loop.step()
    with pytest.raises(WeightsUnusable, match="cannot write version 2"):
        trainer.loop.step()
    assert (proxy.version, set(proxy.consumed.values())) == (1, {1})


def test_it_is_refused_where_nothing_could_be_computed_meanwhile(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    proxy = TrainingProxy(base_model=str(tiny_model))
    with pytest.raises(ConfigurationError, match="max_staleness = 0"):
        start(proxy, settings(tmp_path, batch={"max_staleness": 0}, weights={"behind": True}))


def test_a_restart_between_optimiser_states_goes_on_with_the_newest_one(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    """Nothing is consumed twice or lost: weights and counters are the head's, only the moments are older."""
    proxy = TrainingProxy(base_model=str(tiny_model))
    batches(proxy, 7)
    chosen = configured(tmp_path, behind=False, optimizer_every=3, keep_optimizer_states=1, dtype="bfloat16")
    trainer = start(proxy, chosen)
    trainer.loop.resume()
    moments: list[torch.Tensor] = []
    for _ in range(5):
        trainer.loop.step()
        state: Any = trainer.learner.capture()["optimizer"]["model.norm.weight"]
        moments.append(state["exp_avg"].clone())
    states = sorted((tmp_path / "run_test").glob("v*/trainer_state/state.json"))
    assert [path.parent.parent.name[:7] for path in states] == ["v000003"]
    again = start(proxy, chosen)
    again.loop.resume()
    assert again.learner.steps == trainer.learner.steps > 0
    assert torch.equal(again.learner.capture()["optimizer"]["model.norm.weight"]["exp_avg"], moments[2])
    for name, weight in again.weights().items():
        published, trained = weight.bfloat16(), trainer.weights()[name]
        assert torch.equal(published, trained.bfloat16())
        assert (weight - trained).abs().max() <= trained.abs().max() / 128
    again.loop.step()
    again.loop.step()
    assert [_older(commit) for commit in proxy.commits] == [False] * 5 + [True, False]
    assert list(proxy.consumed.values()) == [1] * 28


def _older(commit: CommitRequest) -> bool:
    assert commit.step.inputs is not None
    return commit.step.inputs.older_optimizer
