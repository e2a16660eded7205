"""Compare losses of pairs with closed forms in float64, written out pair by pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.preferences import PreferenceInputs, accuracy, bradley_terry, preference_loss
from trainer.config import PreferenceForm

total = st.floats(-40, 0)
pair = st.tuples(total, total, total, total, st.integers(1, 30), st.integers(1, 30))
pairs = st.lists(pair, min_size=1, max_size=6)
NAMES = (
    "chosen_P",
    "rejected_P",
    "reference_chosen_P",
    "reference_rejected_P",
    "chosen_tokens_P",
    "rejected_tokens_P",
)


def inputs_of(rows: list[Any], denominator: int) -> PreferenceInputs:
    columns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 6).T
    parts = dict(zip(NAMES, (column.clone() for column in columns), strict=True))
    for name in NAMES[:2]:
        parts[name].requires_grad_()
    return PreferenceInputs(**parts, share_P=torch.full((len(rows),), 1 / denominator, dtype=torch.float64))


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value)) if value > 0 else value - math.log1p(math.exp(value))


@pytest.mark.parametrize("form", list(PreferenceForm))
@given(rows=pairs, beta=st.floats(0.01, 2), smoothing=st.floats(0, 0.49), denominator=st.integers(1, 9))
def test_preferences(form: PreferenceForm, rows: list[Any], beta: float, smoothing: float, denominator: int) -> None:
    """Compare value and slopes; the rejected side's slope is the chosen one's with the opposite sign, per its own
    tokens."""
    inputs = inputs_of(rows, denominator)
    found = preference_loss(inputs, form, beta, smoothing)
    loss, up, down, margins = 0.0, [], [], []
    for chosen, rejected, reference_chosen, reference_rejected, many, few in rows:
        of_chosen, of_rejected = (1, 1) if form is PreferenceForm.SIGMOID else (many, few)
        ahead = (chosen - reference_chosen) / of_chosen - (rejected - reference_rejected) / of_rejected
        if form is PreferenceForm.IPO:
            loss += (ahead - 0.5 / beta) ** 2
            slope = 2 * (ahead - 0.5 / beta)
        else:
            loss += -(1 - smoothing) * log_sigmoid(beta * ahead) - smoothing * log_sigmoid(-beta * ahead)
            slope = beta * (math.exp(log_sigmoid(beta * ahead)) - (1 - smoothing))
        up.append(slope / of_chosen / denominator)
        down.append(-slope / of_rejected / denominator)
        margins.append(beta * ahead)
    assert found.loss.item() == pytest.approx(loss / denominator, rel=1e-9, abs=1e-12)
    slopes = torch.autograd.grad(found.loss, (inputs.chosen_P, inputs.rejected_P))
    assert slopes[0].tolist() == pytest.approx(up, rel=1e-7, abs=1e-10)
    assert slopes[1].tolist() == pytest.approx(down, rel=1e-7, abs=1e-10)
    assert found.margin_P.tolist() == pytest.approx(margins, rel=1e-9, abs=1e-12)
    assert not found.margin_P.requires_grad


@pytest.mark.parametrize("form", list(PreferenceForm))
@given(row=pair, beta=st.floats(0.01, 1))
def test_if_policy_and_reference_agree_the_chosen_side_is_raised(
    form: PreferenceForm, row: tuple[float, ...], beta: float
) -> None:
    inputs = inputs_of([(*row[:2], *row[:2], *row[4:])], 1)
    up, down = torch.autograd.grad(preference_loss(inputs, form, beta).loss, (inputs.chosen_P, inputs.rejected_P))
    assert up.item() < 0 < down.item()


@given(rows=st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)), min_size=1, max_size=8))
def test_bradley_terry(rows: list[tuple[float, float]]) -> None:
    chosen_P, rejected_P = torch.tensor(rows, dtype=torch.float64).T.clone().requires_grad_()
    share_P = torch.full((len(rows),), 1 / len(rows), dtype=torch.float64)
    found = bradley_terry(chosen_P, rejected_P, share_P)
    wanted = math.fsum(-log_sigmoid(up - down) for up, down in rows) / len(rows)
    assert found.loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    (slope_P,) = torch.autograd.grad(found.loss, chosen_P, retain_graph=True)
    wanted_slopes = [-math.exp(log_sigmoid(down - up)) / len(rows) for up, down in rows]
    assert slope_P.tolist() == pytest.approx(wanted_slopes, rel=1e-7, abs=1e-12)
    right = [1.0 if up > down else 0.5 if up == down else 0.0 for up, down in rows]
    assert accuracy(found.margin_P) == pytest.approx(sum(right) / len(right))


@given(rows=pairs, cut=st.integers(0, 6))
def test_parts_sum_to_the_batch(rows: list[Any], cut: int) -> None:
    whole = preference_loss(inputs_of(rows, len(rows)), PreferenceForm.SIGMOID, 0.1).loss.item()
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    summed = sum(
        preference_loss(inputs_of(part, len(rows)), PreferenceForm.SIGMOID, 0.1).loss.item() for part in parts
    )
    assert summed == pytest.approx(whole, rel=1e-9)
