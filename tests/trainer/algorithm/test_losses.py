"""The losses against closed forms in float64, written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.losses import ClipRange, PolicyLossInputs, decoupled_policy_loss, loglinear_proximal

Token = tuple[float, float, float, float]

logprob = st.floats(-6, 0)
tokens = st.lists(st.tuples(logprob, logprob, logprob, st.floats(-3, 3)), min_size=1, max_size=12)


def bundle(rows: list[Token]) -> PolicyLossInputs:
    columns = torch.tensor(rows, dtype=torch.float64).T
    return PolicyLossInputs(
        logprobs_N=columns[0].clone().requires_grad_(),
        proximal_N=columns[1],
        behaviour_N=columns[2],
        advantages_N=columns[3],
    )


def reference(row: Token, low: float, high: float, dual: float | None, cap: float) -> tuple[float, float]:
    """(loss term, its derivative by the log-probability)."""
    logp, prox, behave, advantage = row
    ratio, weight = math.exp(logp - prox), min(math.exp(prox - behave), cap)
    clipped = min(max(ratio, 1 - low), 1 + high)
    term, slope = max((-ratio * advantage, -ratio * advantage), (-clipped * advantage, 0.0))
    if -ratio * advantage >= -clipped * advantage:
        slope = -ratio * advantage
    if dual is not None and advantage < 0 and term > -dual * advantage:
        term, slope = -dual * advantage, 0.0
    return weight * term, weight * slope


@given(rows=tokens, dual=st.none() | st.floats(1.5, 4), cap=st.floats(1, 5), denominator=st.integers(1, 50))
def test_decoupled_loss_and_gradient(rows: list[Token], dual: float | None, cap: float, denominator: int) -> None:
    inputs = bundle(rows)
    result = decoupled_policy_loss(inputs, ClipRange(low=0.2, high=0.28, dual=dual), cap, denominator)
    result.loss.backward()  # type: ignore[no-untyped-call]
    terms, slopes = zip(*(reference(row, 0.2, 0.28, dual, cap) for row in rows), strict=True)
    assert result.loss.item() == pytest.approx(math.fsum(terms) / denominator, rel=1e-9, abs=1e-12)
    assert inputs.logprobs_N.grad is not None
    at_the_edge = [
        abs(math.exp(row[0] - row[1]) - edge) < 1e-9
        for row in rows
        for edge in (0.8, 1.28, *([dual] if dual else []))
    ]
    if not any(at_the_edge):
        wanted = [slope / denominator for slope in slopes]
        assert inputs.logprobs_N.grad.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        no_gradient = [slope == 0 and row[3] != 0 for slope, row in zip(slopes, rows, strict=True)]
        assert result.clipped_N.tolist() == no_gradient


@given(rows=tokens, split=st.integers(0, 12))
def test_micro_batches_sum_to_the_batch(rows: list[Token], split: int) -> None:
    clip = ClipRange(low=0.2, high=0.28)
    total = decoupled_policy_loss(bundle(rows), clip, 2.0, len(rows)).loss
    parts = [part for part in (rows[:split], rows[split:]) if part]
    assert sum(decoupled_policy_loss(bundle(part), clip, 2.0, len(rows)).loss.item() for part in parts) == (
        pytest.approx(total.item(), abs=1e-12)
    )


def test_no_tokens_no_loss() -> None:
    empty = torch.zeros(0)
    inputs = PolicyLossInputs(logprobs_N=empty, proximal_N=empty, behaviour_N=empty, advantages_N=empty)
    assert decoupled_policy_loss(inputs, ClipRange(low=0.2, high=0.28), 2.0, 7).loss.item() == 0.0


@given(logp=logprob, behave=logprob, version=st.integers(1, 20), born=st.integers(0, 19))
def test_loglinear_proximal(logp: float, behave: float, version: int, born: int) -> None:
    """Against the formula in versions: v is the one being made, v_b the token's own."""
    born = min(born, version - 1)
    alpha = min(max((version - 1 - born) / (version - born), 0.0), 1.0)
    found = loglinear_proximal(
        torch.tensor([logp], dtype=torch.float64),
        torch.tensor([behave], dtype=torch.float64),
        torch.tensor([float(version - 1 - born)], dtype=torch.float64),
    )
    assert found.item() == pytest.approx(behave + alpha * (logp - behave), abs=1e-12)
    if born == version - 1:
        assert found.item() == behave


def test_a_token_from_a_newer_version_has_its_behaviour_as_proximal() -> None:
    """After a rollback tokens can be younger than the head."""
    found = loglinear_proximal(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([-2.0]))
    assert found.item() == -2.0


@given(
    st.lists(st.floats(-4, 4), min_size=4, max_size=8),
    st.sets(st.integers(0, 3), min_size=1),
    st.floats(-3, 3),
)
def test_tokens_drawn_under_a_constraint_give_the_policys_own_gradient_over_what_was_allowed(
    logits: list[float], allowed: set[int], advantage: float
) -> None:
    """Averaged over draws from the renormalised distribution: that of −A · (what the policy gives to all of it)."""
    logits_V = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor(sorted(allowed))
    logprobs_N = torch.log_softmax(logits_V, -1)[chosen]
    behaviour_N = torch.log_softmax(logits_V[chosen], -1).detach()
    loss = torch.zeros((), dtype=torch.float64)
    for index in range(len(chosen)):
        drawn = PolicyLossInputs(
            logprobs_N=logprobs_N[index : index + 1],
            proximal_N=logprobs_N[index : index + 1].detach(),
            behaviour_N=behaviour_N[index : index + 1],
            advantages_N=torch.tensor([advantage], dtype=torch.float64),
        )
        result = decoupled_policy_loss(drawn, ClipRange(low=0.2, high=0.3), 5.0, 1)
        loss = loss + behaviour_N[index].exp() * result.loss
    (found,) = torch.autograd.grad(loss, logits_V, retain_graph=True)
    (wanted,) = torch.autograd.grad(-advantage * logprobs_N.exp().sum(), logits_V)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
