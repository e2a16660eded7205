"""Compare the estimators with sums over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.divergence import divergence, still_to_come
from trainer.config import Divergence

logits = st.lists(st.floats(-3, 3), min_size=4, max_size=4)


def over_all_draws(policy: list[float], reference: list[float], form: Divergence) -> tuple[float, list[float]]:
    """Return the mean over the policy's samples of the estimate, and of its gradient by the policy's logits."""
    logits_V = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    logprobs_V = torch.log_softmax(logits_V, -1)
    estimates_V = divergence(form, logprobs_V, torch.log_softmax(torch.tensor(reference, dtype=torch.float64), -1))
    mean = (logprobs_V.detach().exp() * estimates_V).sum()
    (gradient,) = torch.autograd.grad(mean, logits_V)
    return mean.item(), gradient.tolist()


def exact(policy: list[float], reference: list[float]) -> tuple[float, list[float]]:
    logits_V = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    logprobs_V = torch.log_softmax(logits_V, -1)
    kl = (logprobs_V.exp() * (logprobs_V - torch.log_softmax(torch.tensor(reference, dtype=torch.float64), -1))).sum()
    (gradient,) = torch.autograd.grad(kl, logits_V)
    return kl.item(), gradient.tolist()


@given(policy=logits, reference=logits)
def test_k1_and_k3_are_the_divergence_on_average_and_k2_has_its_gradient(
    policy: list[float], reference: list[float]
) -> None:
    kl, gradient = exact(policy, reference)
    for form in (Divergence.K1, Divergence.K3):
        assert over_all_draws(policy, reference, form)[0] == pytest.approx(kl, abs=1e-9)
    assert over_all_draws(policy, reference, Divergence.K2)[1] == pytest.approx(gradient, abs=1e-9)
    assert over_all_draws(policy, reference, Divergence.K1)[1] == pytest.approx([0.0] * 4, abs=1e-9)


@given(policy=logits, reference=logits)
def test_k3_in_the_loss_and_k1_in_reward_have_the_gradients_that_are_said(
    policy: list[float], reference: list[float]
) -> None:
    logits_V = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    logprobs_V = torch.log_softmax(logits_V, -1)
    reference_V = torch.log_softmax(torch.tensor(reference, dtype=torch.float64), -1)
    (reverse,) = torch.autograd.grad((reference_V.exp() * -logprobs_V).sum(), logits_V, retain_graph=True)
    assert over_all_draws(policy, reference, Divergence.K3)[1] == pytest.approx(reverse.tolist(), abs=1e-9)
    paid_V = divergence(Divergence.K1, logprobs_V, reference_V).detach()
    (score,) = torch.autograd.grad((logprobs_V.detach().exp() * paid_V * logprobs_V).sum(), logits_V)
    assert score.tolist() == pytest.approx(exact(policy, reference)[1], abs=1e-9)


@given(logp=st.floats(-8, 0), reference=st.floats(-8, 0))
def test_k3_is_never_negative(logp: float, reference: float) -> None:
    one, other = torch.tensor([logp], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    found = divergence(Divergence.K3, one, other).item()
    assert found == pytest.approx(math.exp(reference - logp) - 1 - (reference - logp), abs=1e-9)
    assert found >= 0


@given(answers=st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), max_size=5))
def test_what_is_still_to_come_ends_with_the_answer(answers: list[list[float]]) -> None:
    values_N = torch.tensor([value for answer in answers for value in answer], dtype=torch.float64)
    numbers = [number for number, answer in enumerate(answers) for _ in answer]
    found = still_to_come(values_N, torch.tensor(numbers, dtype=torch.long)).tolist()
    wanted = [math.fsum(answer[place:]) for answer in answers for place in range(len(answer))]
    assert found == pytest.approx(wanted, abs=1e-9)
