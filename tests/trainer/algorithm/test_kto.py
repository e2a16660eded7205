"""Compare KTO with its formula in the paper, in plain Python floats (float64)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.kto import KtoInputs, kto_loss, reference_point

LOGPROBS = st.floats(-60.0, 0.0)
ROWS = st.lists(st.tuples(LOGPROBS, LOGPROBS, st.booleans()), min_size=1, max_size=8)
PAIRS = st.lists(st.tuples(LOGPROBS, LOGPROBS), max_size=8)


def inputs_of(rows: list[Any], pairs: list[Any], denominator: int) -> KtoInputs:
    def column(values: list[Any], place: int) -> torch.Tensor:
        return torch.tensor([value[place] for value in values], dtype=torch.float64)

    return KtoInputs(
        logprobs_E=column(rows, 0).requires_grad_(),
        reference_E=column(rows, 1),
        mismatched_M=column(pairs, 0),
        mismatched_reference_M=column(pairs, 1),
        desirable_E=torch.tensor([row[2] for row in rows]),
        share_E=torch.full((len(rows),), 1 / denominator, dtype=torch.float64),
    )


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def in_the_paper(
    rows: list[Any], pairs: list[Any], beta: float, good: float, bad: float
) -> tuple[float, list[float]]:
    """Return E[λ_y − v(x, y)] and its derivative by each log π(y|x) with z₀ constant (Ethayarajh et al. 2024)."""
    z0 = max(0.0, sum(policy - reference for policy, reference in pairs) / len(pairs)) if pairs else 0.0
    total, slopes = 0.0, []
    for policy, reference, desirable in rows:
        r = policy - reference
        weight = good if desirable else bad
        value = weight * sigmoid(beta * (r - z0) if desirable else beta * (z0 - r))
        total += (weight - value) / len(rows)
        slope = value * (1 - value / weight) * beta / len(rows)
        slopes.append(-slope if desirable else slope)
    return total, slopes


@given(rows=ROWS, pairs=PAIRS, beta=st.floats(0.01, 1.0), good=st.floats(0.1, 3.0), bad=st.floats(0.1, 3.0))
def test_kto_is_the_papers(rows: list[Any], pairs: list[Any], beta: float, good: float, bad: float) -> None:
    inputs = inputs_of(rows, pairs, len(rows))
    found = kto_loss(inputs, beta, good, bad)
    (slopes,) = torch.autograd.grad(found.loss, inputs.logprobs_E)
    wanted, wanted_slopes = in_the_paper(rows, pairs, beta, good, bad)
    assert found.loss.item() == pytest.approx(wanted, abs=1e-9)
    assert slopes.tolist() == pytest.approx(wanted_slopes, abs=1e-9)


@given(rows=ROWS, pairs=PAIRS)
def test_the_better_answer_becomes_likelier(rows: list[Any], pairs: list[Any]) -> None:
    """A step down the gradient raises desirable answers and lowers undesirable ones, wherever the reference point
    is."""
    inputs = inputs_of(rows, pairs, len(rows))
    (slopes,) = torch.autograd.grad(kto_loss(inputs, 0.1, 1.0, 1.0).loss, inputs.logprobs_E)
    assert all((slope <= 0) == row[2] or slope == 0 for slope, row in zip(slopes.tolist(), rows, strict=True))


def test_the_reference_point_is_never_below_zero_and_has_no_gradient() -> None:
    policy = torch.tensor([-5.0, -3.0], requires_grad=True)
    assert reference_point(policy, torch.tensor([-2.0, -2.0])).item() == 0.0
    above = reference_point(policy, torch.tensor([-7.0, -7.0]))
    assert (above.item(), above.requires_grad) == (3.0, False)
    assert reference_point(torch.zeros(0), torch.zeros(0)).item() == 0.0


def test_before_the_first_step_every_example_is_at_the_point() -> None:
    rows = [(-3.0, -3.0, True), (-9.0, -9.0, False)]
    found = kto_loss(inputs_of(rows, [(-4.0, -4.0)], 2), 0.1, 1.0, 1.5)
    assert found.loss.item() == pytest.approx((0.5 * 1.0 + 0.5 * 1.5) / 2)
    assert found.rewards_E.tolist() == [0.0, 0.0]
