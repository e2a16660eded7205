from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.imitation import distillation, negative_log_likelihood

logprob = st.floats(-6, 0)
tokens = st.lists(st.tuples(logprob, logprob, logprob, st.floats(0, 1)), min_size=1, max_size=10)


@given(tokens)
def test_negative_log_likelihood(rows: list[tuple[float, float, float, float]]) -> None:
    logprobs_N = torch.tensor([row[0] for row in rows], dtype=torch.float64, requires_grad=True)
    share_N = torch.tensor([row[3] for row in rows], dtype=torch.float64)
    loss = negative_log_likelihood(logprobs_N, share_N)
    assert loss.item() == pytest.approx(-math.fsum(row[0] * row[3] for row in rows))
    (slopes,) = torch.autograd.grad(loss, logprobs_N)
    assert slopes.tolist() == pytest.approx([-row[3] for row in rows])


@given(rows=tokens)
def test_distillation(rows: list[tuple[float, float, float, float]]) -> None:
    """Rows are (logp, logarithm of the weight, teacher, share)."""
    columns = torch.tensor(rows, dtype=torch.float64).T
    logprobs_N = columns[0].clone().requires_grad_()
    loss = distillation(logprobs_N, columns[2], columns[3], columns[1].exp())
    value, slopes = 0.0, []
    for logp, logweight, teacher, share in rows:
        slopes.append(share * math.exp(logweight) * (logp - teacher))
        value += slopes[-1]
    assert loss.item() == pytest.approx(value, rel=1e-9, abs=1e-12)
    (found,) = torch.autograd.grad(loss, logprobs_N)
    assert found.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.data())
def test_distillation_has_the_gradient_of_the_divergence_from_the_teacher(
    logits: list[float], data: st.DataObject
) -> None:
    """Value and gradient are averaged over samples of the policy."""
    other = data.draw(st.lists(st.floats(-3, 3), min_size=len(logits), max_size=len(logits)))
    logits_V = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.tensor(other, dtype=torch.float64).log_softmax(-1)
    logprobs_V = logits_V.log_softmax(-1)
    drawn_V = logprobs_V.detach()
    loss = distillation(logprobs_V, teacher_V, drawn_V.exp(), torch.ones_like(drawn_V))
    divergence = (logprobs_V.exp() * (logprobs_V - teacher_V)).sum()
    assert loss.item() == pytest.approx(divergence.item(), abs=1e-9)
    (found,) = torch.autograd.grad(loss, logits_V, retain_graph=True)
    (wanted,) = torch.autograd.grad(divergence, logits_V)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
