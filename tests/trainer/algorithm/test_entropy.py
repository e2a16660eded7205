"""Compare the entropy bonus and the selection of high-entropy tokens with references in float64 written from the
papers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.test_update import packed_of
from tests.trainer.tiny import ALONE, load_tiny, trajectory, turn
from trainer.algorithm.entropy import ROUNDING, entropy_loss, high_entropy_threshold
from trainer.algorithm.logprobs import of_logits
from trainer.algorithm.presets import resolve
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, Packing
from trainer.update import Learner, Outcome

SMALL_ROWS = BatchSettings(packing=Packing.PACKED, row_tokens=16, max_tokens_per_microbatch=16)


def test_the_bonus_is_the_entropys_own_gradient() -> None:
    """dH/dz_j = −p_j (log p_j + H) / temperature (the derivative of −Σ p log p through a softmax), in float64."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(6, 40, generator=generator, dtype=torch.float64) * 2
    temperature_N = torch.rand(6, generator=generator, dtype=torch.float64) + 0.5
    share_N = torch.tensor([0.5, 0.1, 0.0, 0.2, 0.1, 0.1])
    scaled_NV = logits_NV / temperature_N[:, None]
    p_NV = scaled_NV.exp() / scaled_NV.exp().sum(-1, keepdim=True)
    wanted_N = -(p_NV * p_NV.log()).sum(-1)
    wanted_loss = -0.3 * (share_N.double() * wanted_N).sum()
    slope_NV = -p_NV * (p_NV.log() + wanted_N[:, None]) / temperature_N[:, None]
    wanted_gradient = -0.3 * share_N.double()[:, None] * slope_NV

    given_NV = logits_NV.float().requires_grad_()
    _, entropy_N = of_logits(given_NV, torch.arange(6), temperature_N.float(), entropy_gradient=True)
    loss = entropy_loss(entropy_N, share_N, 0.3)
    (gradient,) = torch.autograd.grad(loss, given_NV)
    assert abs(loss.item() - wanted_loss.item()) < 1e-6
    assert (gradient.double() - wanted_gradient).abs().max() < 1e-6


@given(
    entropies=st.lists(st.floats(0, 12, allow_nan=False, width=32), min_size=1, max_size=60),
    share=st.sampled_from([0.01, 0.1, 0.2, 0.5, 0.8, 1.0]),
)
def test_the_threshold_selects_the_share_of_tokens_and_ties_with_the_last(
    entropies: list[float], share: float
) -> None:
    threshold = high_entropy_threshold(torch.tensor(entropies), share)
    ranked = sorted(entropies, reverse=True)
    top = next(count for count in range(1, len(ranked) + 1) if count >= share * len(ranked) - 1e-9)
    assert threshold == ranked[top - 1] - ROUNDING
    assert sum(entropy >= threshold for entropy in entropies) >= top
    assert sum(entropy > threshold + 2 * ROUNDING for entropy in entropies) < top


def test_tokens_after_the_same_text_are_all_selected_or_none() -> None:
    """Their entropies differ only by rounding."""
    threshold = high_entropy_threshold(torch.tensor([3.0, 2.0, 2.000001, 1.999999, 1.0]), 0.4)
    assert 1.0 < threshold < 1.999999


def test_the_threshold_uses_the_decimal_value_of_the_share() -> None:
    assert high_entropy_threshold(torch.arange(15.0), 0.2) == 12.0 - ROUNDING, (
        "3 of 15, though 0.2 · 15 > 3 in floating point"
    )
    assert high_entropy_threshold(torch.empty(0), 0.2) == -math.inf


def learnt(base: Path, algorithm: AlgorithmSettings, settings: BatchSettings | None = None) -> tuple[Outcome, Tensor]:
    """Make one step on twelve answers of different lengths. Return its outcome and the gradient of all weights as a
    vector."""
    generator = torch.Generator().manual_seed(0)
    members = [
        trajectory(
            turn(
                torch.randint(0, 64, (2 + index % 5,), generator=generator).tolist(),
                temperature=(0.7, 1.0, 1.4)[index % 3],
            ),
            reward=float(index % 3 == 0),
        )
        for index in range(12)
    ]
    groups = [0] * 4 + [1] * 4 + [2, 2, 3, 3]
    model = load_tiny(base, entropy_gradient=algorithm.learns_entropy)
    gradients: list[Tensor] = []

    def remember(*_: object) -> None:
        gradients.append(
            torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        )

    learner = Learner(model, resolve(algorithm), OptimizerSettings(clip_norm=1e9), ALONE)
    learner.optimizer.register_step_pre_hook(remember)
    outcome = learner.update(packed_of(members, groups, algorithm, settings))
    return outcome, gradients[0]


@pytest.mark.parametrize(
    "parts",
    [{"entropy_coefficient": 0.05}, {"top_entropy_share": 0.2}, {"preset": "dapo", "entropy_coefficient": 0.1}],
)
def test_the_entropy_parts_change_the_gradient_and_micro_batches_do_not(
    tiny_model: Path, parts: dict[str, object]
) -> None:
    """The threshold is that of the whole batch, and the bonus also gives answers without an advantage a gradient."""
    algorithm = AlgorithmSettings.model_validate(parts)
    whole, gradient = learnt(tiny_model, algorithm)
    divided, in_parts = learnt(tiny_model, algorithm, SMALL_ROWS)
    assert whole.loss == pytest.approx(divided.loss, abs=1e-6)
    torch.testing.assert_close(gradient, in_parts, atol=1e-6, rtol=1e-5)
    _, without = learnt(tiny_model, AlgorithmSettings(preset=algorithm.preset))
    assert (gradient - without).norm() > 1e-3 * without.norm()  # a thousand times the error allowed above


def test_the_bonus_is_the_gradient_of_the_mean_entropy(tiny_model: Path) -> None:
    """The bonus adds −c times the gradient of the mean over all trained tokens."""
    base = AlgorithmSettings(mini_batches=1)
    bonus = AlgorithmSettings(mini_batches=1, entropy_coefficient=0.05)
    (before, without), (after, gradient) = learnt(tiny_model, base), learnt(tiny_model, bonus)
    assert before.tokens is not None
    mean = before.tokens.entropy_N.double().mean().item()
    assert after.loss - before.loss == pytest.approx(-0.05 * mean, abs=1e-6)
    _, twice = learnt(tiny_model, AlgorithmSettings(mini_batches=1, entropy_coefficient=0.1))
    torch.testing.assert_close(twice - without, 2 * (gradient - without), atol=2e-6, rtol=1e-4)


def test_only_tokens_of_high_entropy_are_in_the_policy_loss(tiny_model: Path) -> None:
    """Σ over the top 20 % of −A, over the count of all tokens: at ratio 1, in float64, from the recorded figures."""
    outcome, _ = learnt(tiny_model, AlgorithmSettings(top_entropy_share=0.2, mini_batches=1))
    tokens = outcome.tokens
    assert tokens is not None
    entropies = tokens.entropy_N.tolist()
    taken = sorted(range(len(entropies)), key=lambda place: -entropies[place])[: math.ceil(0.2 * len(entropies))]
    assert outcome.entropy_threshold == entropies[taken[-1]] - ROUNDING
    assert sorted((~tokens.clipped_N).nonzero()[:, 0].tolist()) == sorted(taken)
    terms = [-tokens.advantages_N[place].double() * tokens.weight_N[place].double() for place in taken]
    assert outcome.loss == pytest.approx(float(sum(terms)) / len(entropies), abs=1e-6)


def test_a_policy_trained_by_the_bonus_alone_gains_entropy(tiny_model: Path) -> None:
    """Along the gradient of the bonus, the mean entropy rises."""
    algorithm = AlgorithmSettings(entropy_coefficient=100.0)
    model = load_tiny(tiny_model, entropy_gradient=True)
    members = [trajectory(turn([4, 5, 6]), reward=reward) for reward in (1.0, 0.0)]
    learner = Learner(model, resolve(algorithm), OptimizerSettings(learning_rate=1e-3), ALONE)
    means = []
    for _ in range(3):
        tokens = learner.update(packed_of(members, [0, 0], algorithm)).tokens
        assert tokens is not None
        means.append(tokens.entropy_N.mean().item())
    assert means[0] < means[1] < means[2]
