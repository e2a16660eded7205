"""Compare KTO over packed rows with its terms written out side by side, and check the pairs of its reference
point."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch

from proxy.contract.trajectory import Trajectory
from tests.trainer.fit.test_fitting import CPU, LARGE, SMALL, branching, gradients, reckoned
from tests.trainer.tiny import load_tiny, trajectory, turn
from trainer.batching.sequences import training_sequences
from trainer.config import BatchSettings
from trainer.fit.records import Labelled
from trainer.fit.unpaired import Unpaired, mismatched
from trainer.models.huggingface import PolicyModel

ITEMS = [
    Labelled(id="a", trajectory=branching((10, 11), (12, 13, 14)), desirable=True),
    Labelled(id="b", trajectory=trajectory(turn([20, 21], prompt=(4, 5))), desirable=False),
    Labelled(id="c", trajectory=trajectory(turn([30], prompt=(6, 7, 8))), desirable=True),
]


def unpaired(model: PolicyModel, settings: BatchSettings) -> Unpaired:
    return Unpaired(model, settings, CPU, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)


@pytest.mark.parametrize("settings", [SMALL, LARGE])
def test_micro_batches_have_the_gradient_of_the_whole(tiny_model: Path, settings: BatchSettings) -> None:
    model, reference = load_tiny(tiny_model), load_tiny(tiny_model).requires_grad_(False)
    objective = unpaired(model, settings)
    objective.remember(ITEMS)
    with torch.no_grad():  # the weights have moved since
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(1.0 + 0.02 * (index % 3))
    others = [*ITEMS[-1:], *ITEMS[:-1]]
    pairs = [mismatched(one.trajectory, other.trajectory, None) for one, other in zip(ITEMS, others, strict=True)]

    def apart(side: Trajectory | None) -> torch.Tensor:
        assert side is not None
        return (reckoned(model, side)[0] - reckoned(reference, side)[0]).double()

    with torch.no_grad():
        point = max(0.0, torch.stack([apart(pair) for pair in pairs]).mean().item())
    total = torch.zeros((), dtype=torch.float64)
    for item in ITEMS:
        sign, weight = (1, 1.2) if item.desirable else (-1, 0.7)
        total = total + weight * (1 - torch.sigmoid(sign * 0.3 * (apart(item.trajectory) - point))) / len(ITEMS)
    torch.autograd.backward(total)
    wanted = gradients(model)
    model.zero_grad(set_to_none=True)

    assert objective.accumulate(ITEMS) == pytest.approx(total.item(), abs=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4)
    figures = objective.evaluate(ITEMS)
    assert figures["loss"] == pytest.approx(total.item(), abs=1e-6)
    assert figures["reference_point"] == pytest.approx(0.3 * point, abs=1e-5)


def test_at_the_reference_nothing_is_gained(tiny_model: Path) -> None:
    objective = unpaired(load_tiny(tiny_model), LARGE)
    objective.remember(ITEMS)
    figures = objective.evaluate(ITEMS)
    assert figures["loss"] == pytest.approx((2 * 1.2 + 0.7) * 0.5 / 3)
    assert (figures["margin"], figures["reference_point"], figures["accuracy"]) == (0.0, 0.0, 0.5)
    assert "margin" not in objective.evaluate([item for item in ITEMS if item.desirable])


def test_a_mismatched_pair_has_a_prompt_and_the_answer_to_another() -> None:
    long = trajectory(turn([10, 11], prompt=(1, 2)), turn([12, 13], prompt=(3,), parent=0, prefix=4))
    other = trajectory(turn([20], prompt=(7, 8, 9)))
    pair = mismatched(other, long, None)
    assert pair is not None
    (sequence,) = training_sequences(pair, 0)
    assert sequence.ids == (7, 8, 9, 10, 11, 3, 12, 13)
    assert [(span.start, span.length) for span in sequence.spans] == [(3, 2), (6, 2)]
    cut = mismatched(other, long, 7)
    assert cut is not None
    assert training_sequences(cut, 0)[0].ids == (7, 8, 9, 10, 11, 3, 12)
    assert mismatched(other, long, 3) is None


def test_redacted_tokens_stay_context() -> None:
    hidden = msgspec.structs.replace(turn([10, 11, 12], prompt=(1, 2)), masked=((3, 4),))
    pair = mismatched(trajectory(turn([20], prompt=(7, 8, 9))), trajectory(hidden), None)
    assert pair is not None
    assert list(pair.turns[0].learnt) == [0, 2]


def test_a_single_example_has_no_pair(tiny_model: Path) -> None:
    objective = unpaired(load_tiny(tiny_model), LARGE)
    objective.remember(ITEMS[:1])
    assert math.isfinite(objective.accumulate(ITEMS[:1]))
