from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.conftest import Start
from tests.trainer.test_loop import random_groups, same
from tests.trainer.tiny import ALONE, load_tiny, settings, trajectory, turn
from trainer.algorithm.advantages import assign
from trainer.algorithm.contradictions import check_reference
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.batching.grouping import Batch
from trainer.batching.packing import MiniBatch, mini_batches
from trainer.batching.sequences import linearise
from trainer.config import (
    AdapterSettings,
    AlgorithmSettings,
    BatchSettings,
    OptimizerSettings,
    ReferenceSettings,
    TrainerSettings,
)
from trainer.errors import ConfigurationError, WeightsUnusable
from trainer.loading import load_learnt, reference_of
from trainer.models.passes import Rows
from trainer.models.policy import Policy
from trainer.parallel.checkpoint import load_state, save_state
from trainer.reference import FollowingReference
from trainer.update import Learner

HELD = AlgorithmSettings(kl_coefficient=0.5, mini_batches=1)
"""Settings with one optimiser step per update."""
IDS = torch.arange(1, 9)[None]
ROWS = Rows(IDS, torch.arange(8)[None], torch.arange(7), IDS[0, 1:], torch.ones(7))

Weights = dict[str, torch.Tensor]


def weights_of(policy: Policy) -> Weights:
    return {name: weight.detach().clone() for name, weight in policy.named_weights()}


def a_batch(number: int) -> list[MiniBatch]:
    members = [trajectory(turn([4, 5, 6 + number % 3]), reward=1.0), trajectory(turn([7, 8]), reward=0.0)]
    batch = Batch(trajectories=tuple(members), groups=(0, 0), base_version=0)
    parts = resolve(HELD)
    advantages = assign(members, [0, 0], parts, RunningMeans.fresh(0.9))
    return mini_batches(batch, advantages.turns, linearise(members), BatchSettings(), parts)


def learner_with(directory: Path, adapter: AdapterSettings | None = None, **reference: Any) -> Learner:
    configured = TrainerSettings(algorithm=HELD, reference=ReferenceSettings(**reference), adapter=adapter)
    model = load_learnt(directory, configured, ALONE)
    held_to = reference_of(model, directory, configured, ALONE)
    return Learner(model, resolve(HELD), OptimizerSettings(learning_rate=1e-2), ALONE, held_to)


def stepped(learner: Learner, numbers: range, then: Callable[[], None] = lambda: None) -> None:
    for number in numbers:
        learner.update(a_batch(number))
        then()


def reference(learner: Learner) -> FollowingReference:
    found = learner.reference
    assert isinstance(found, FollowingReference)
    return found


@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=2)])
def test_an_average_follows_the_policy_step_by_step(tiny_model: Path, adapter: AdapterSettings | None) -> None:
    learner = learner_with(tiny_model, adapter, ema=0.7)
    wanted = {name: weight.double() for name, weight in weights_of(learner.model).items()}

    def average() -> None:
        for name, weight in weights_of(learner.model).items():
            wanted[name] = 0.7 * wanted[name] + 0.3 * weight.double()

    stepped(learner, range(4), average)
    found = reference(learner).capture()
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name].double(), weight, atol=1e-6, rtol=1e-6)
    assert not same(found, weights_of(learner.model))


def test_a_reset_makes_the_reference_the_policy_of_that_step(tiny_model: Path) -> None:
    learner = learner_with(tiny_model, reset_every=2)
    seen = [weights_of(learner.model)]
    held = []
    for number in range(5):
        stepped(learner, range(number, number + 1))
        seen.append(weights_of(learner.model))
        held.append(next(at for at, weights in enumerate(seen) if same(weights, reference(learner).capture())))
    assert held == [0, 2, 2, 4, 4]


def test_the_reference_scores_with_its_own_weights_and_restores_the_policys(tiny_model: Path) -> None:
    learner = learner_with(tiny_model, reset_every=100)
    stepped(learner, range(3))
    before = weights_of(learner.model)
    (scored,) = reference(learner).score([ROWS])
    (of_base,) = load_tiny(tiny_model).score([ROWS])
    assert torch.equal(scored.logprobs_N, of_base.logprobs_N)
    assert same(before, weights_of(learner.model))
    (now,) = learner.model.score([ROWS])
    assert not torch.equal(now.logprobs_N, scored.logprobs_N)


def test_a_failed_reference_pass_restores_the_policys_weights(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_with(tiny_model, ema=0.5)
    stepped(learner, range(1))
    before = weights_of(learner.model)

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(learner.model, "score", fail)
    with pytest.raises(torch.OutOfMemoryError):
        reference(learner).score([ROWS])
    assert same(before, weights_of(learner.model))


@pytest.mark.parametrize("moves", [{"ema": 0.8}, {"reset_every": 2}])
@pytest.mark.parametrize("adapter", [None, AdapterSettings(rank=2)])
def test_a_state_on_disk_contains_all_that_later_steps_need(
    tiny_model: Path, tmp_path: Path, adapter: AdapterSettings | None, moves: dict[str, Any]
) -> None:
    undisturbed = learner_with(tiny_model, adapter, **moves)
    stepped(undisturbed, range(3))
    save_state(undisturbed.capture(), tmp_path / "state", ALONE)
    weights = weights_of(undisturbed.model)
    stepped(undisturbed, range(3, 6))

    again = learner_with(tiny_model, adapter, **moves)
    with torch.no_grad():
        for name, weight in again.model.named_weights():
            weight.copy_(weights[name])
    again.restore(load_state(tmp_path / "state", ALONE, again.divided()))
    stepped(again, range(3, 6))
    assert same(weights_of(again.model), weights_of(undisturbed.model))
    assert same(reference(again).capture(), reference(undisturbed).capture())

    fixed = learner_with(tiny_model, adapter)
    state = load_state(tmp_path / "state", ALONE, fixed.divided())
    assert not state.get("reference")


def test_restarts_change_nothing_with_a_reference_that_follows(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    configured = settings(
        tmp_path,
        optimizer={"learning_rate": 1e-3},
        algorithm={"kl_coefficient": 0.5},
        reference={"ema": 0.5},
    )
    proxies = [TrainingProxy(base_model=str(tiny_model), source=random_groups()) for _ in range(2)]
    undisturbed = start(proxies[0], configured)
    undisturbed.loop.resume()
    for _ in range(4):
        undisturbed.loop.step()
    for _ in range(2):
        trainer = start(proxies[1], configured)
        trainer.loop.resume()
        trainer.loop.step()
        trainer.loop.step()
    first, second = ([commit.weights.sha256 for commit in proxy.commits] for proxy in proxies)
    assert first == second
    proxies[1].move_head(5, None)
    trainer.loop.resume()
    assert same(reference(trainer.learner).capture(), weights_of(trainer.learner.model))


def test_a_reference_of_another_shape_is_refused(tiny_model: Path) -> None:
    learner = learner_with(tiny_model, ema=0.5)
    state = reference(learner).capture()
    name = next(iter(state))
    with pytest.raises(WeightsUnusable, match=name):
        reference(learner).restore({**state, name: torch.zeros(3)})


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="two ways to move the reference"):
        ReferenceSettings(reset_every=3, ema=0.9)
    with pytest.raises(ConfigurationError, match=r"reference\.ema: there is no reference while kl_coefficient and"):
        check_reference(ReferenceSettings(ema=0.9), resolve(AlgorithmSettings()))
    check_reference(ReferenceSettings(ema=0.9), resolve(HELD))
