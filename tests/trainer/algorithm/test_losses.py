"""Compare the losses with closed forms in float64, written out token by token."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.losses import PolicyLossInputs, loglinear_proximal, policy_loss, second_moment_cut
from trainer.algorithm.objective import Objective
from trainer.config import Surrogate

Token = tuple[float, float, float, float]

logprob = st.floats(-6, 0, allow_subnormal=False)
advantages = st.floats(-3, 3, allow_subnormal=False)  # a trainer's processor treats smaller numbers as zero
tokens = st.lists(st.tuples(logprob, logprob, logprob, advantages), min_size=1, max_size=12)
CAP = 2.0
LOW, HIGH = 0.2, 0.28


def objective(surrogate: Surrogate, **parts: float | None) -> Objective:
    given_: dict[str, Any] = {
        "clip_low": LOW,
        "clip_high": HIGH,
        "dual_clip": None,
        "gate_positive": 1.0,
        "gate_negative": 1.05,
        "importance_cap": CAP,
    }
    return Objective(surrogate=surrogate, **{**given_, **parts})


def bundle(rows: list[Token], denominator: float = 1.0, answers: list[int] | None = None) -> PolicyLossInputs:
    columns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4).T
    return PolicyLossInputs(
        logprobs_N=columns[0].clone().requires_grad_(),
        proximal_N=columns[1],
        behaviour_N=columns[2],
        advantages_N=columns[3],
        answer_N=torch.tensor(answers or [0] * len(rows), dtype=torch.long),
        share_N=torch.full((len(rows),), 1 / denominator, dtype=torch.float64),
        altered_N=torch.zeros(len(rows), dtype=torch.bool),
    )


def gradient(inputs: PolicyLossInputs, loss: torch.Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss, inputs.logprobs_N)
    return list(found.tolist())


def reference(row: Token, low: float, high: float, dual: float | None, cap: float) -> tuple[float, float]:
    """Return (loss term, its derivative by the log-probability)."""
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
def test_clipped(rows: list[Token], dual: float | None, cap: float, denominator: int) -> None:
    inputs = bundle(rows, denominator)
    result = policy_loss(inputs, objective(Surrogate.CLIP, dual_clip=dual, importance_cap=cap))
    terms, slopes = zip(*(reference(row, LOW, HIGH, dual, cap) for row in rows), strict=True)
    assert result.loss.item() == pytest.approx(math.fsum(terms) / denominator, rel=1e-9, abs=1e-12)
    at_the_edge = [
        abs(math.exp(row[0] - row[1]) - edge) < 1e-9
        for row in rows
        for edge in (1 - LOW, 1 + HIGH, *([dual] if dual else []))
    ]
    if not any(at_the_edge):
        wanted = [slope / denominator for slope in slopes]
        assert gradient(inputs, result.loss) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        no_gradient = [slope == 0 and row[3] != 0 for slope, row in zip(slopes, rows, strict=True)]
        assert result.clipped_N.tolist() == no_gradient


@given(rows=tokens, data=st.data())
def test_sequence_clipped(rows: list[Token], data: st.DataObject) -> None:
    """GSPO over answers of one advantage each: the answer's ratio times its advantage, clipped as a whole."""
    cuts = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    answers = [sum(cuts[1 : place + 1]) for place in range(len(rows))]
    advantage_of = {answer: rows[answers.index(answer)][3] for answer in answers}
    rows = [(*row[:2], row[1], advantage_of[answer]) for row, answer in zip(rows, answers, strict=True)]
    inputs = bundle(rows, answers=answers)
    lengths = torch.bincount(inputs.answer_N)
    inputs = dataclasses.replace(inputs, share_N=1.0 / lengths[inputs.answer_N].double())
    result = policy_loss(inputs, objective(Surrogate.SEQUENCE_CLIP))
    total, slopes, edges = 0.0, [], []
    for answer, advantage in advantage_of.items():
        own = [row for row, its in zip(rows, answers, strict=True) if its == answer]
        ratio = math.exp(math.fsum(row[0] - row[1] for row in own) / len(own))
        clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
        total += max(-ratio * advantage, -clipped * advantage)
        slope = -ratio * advantage / len(own) if -ratio * advantage >= -clipped * advantage else 0.0
        slopes += [slope] * len(own)
        edges.append(min(abs(ratio - 1 + LOW), abs(ratio - 1 - HIGH)) < 1e-9)
    assert result.loss.item() == pytest.approx(total, rel=1e-9, abs=1e-12)
    if not any(edges):
        assert gradient(inputs, result.loss) == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@given(rows=tokens)
def test_truncated(rows: list[Token]) -> None:
    inputs = bundle(rows)
    result = policy_loss(inputs, objective(Surrogate.TRUNCATED))
    slopes, terms, clipped = [], [], []
    for logp, prox, behave, advantage in rows:
        ratio = math.exp(logp - prox)
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        slopes.append(-min(math.exp(prox - behave), CAP) * bounded * advantage)
        terms.append(slopes[-1] * logp)
        clipped.append(bounded != ratio)
    assert result.loss.item() == pytest.approx(math.fsum(terms), rel=1e-9, abs=1e-12)
    assert gradient(inputs, result.loss) == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    if not any(min(abs(math.exp(row[0] - row[1]) - edge) for edge in (1 - LOW, 1 + HIGH)) < 1e-9 for row in rows):
        assert result.clipped_N.tolist() == clipped


@given(rows=tokens, positive=st.floats(0.2, 5), negative=st.floats(0.2, 5))
def test_gated(rows: list[Token], positive: float, negative: float) -> None:
    inputs = bundle(rows)
    result = policy_loss(inputs, objective(Surrogate.GATED, gate_positive=positive, gate_negative=negative))
    terms, slopes = [], []
    for logp, prox, behave, advantage in rows:
        weight, ratio = min(math.exp(prox - behave), CAP), math.exp(logp - prox)
        tau = positive if advantage > 0 else negative
        gate = 0.5 * (1 + math.tanh(tau * (ratio - 1) / 2))
        terms.append(-weight * 4 / tau * gate * advantage)
        slopes.append(-weight * 4 * gate * (1 - gate) * ratio * advantage)
    assert result.loss.item() == pytest.approx(math.fsum(terms), rel=1e-9, abs=1e-12)
    assert gradient(inputs, result.loss) == pytest.approx(slopes, rel=1e-6, abs=1e-9)
    assert not result.clipped_N.any()


@pytest.mark.parametrize("surrogate", list(Surrogate))
@given(advantage=st.floats(-3, 3), logp=logprob)
def test_where_nothing_has_moved_all_surrogates_are_the_policy_gradient(
    surrogate: Surrogate, advantage: float, logp: float
) -> None:
    inputs = bundle([(logp, logp, logp, advantage)])
    assert gradient(inputs, policy_loss(inputs, objective(surrogate)).loss) == pytest.approx([-advantage], abs=1e-12)


@pytest.mark.parametrize("surrogate", list(Surrogate))
@given(rows=tokens, split=st.integers(0, 12))
def test_micro_batches_sum_to_the_batch(surrogate: Surrogate, rows: list[Token], split: int) -> None:
    """Every answer is within one micro-batch."""
    split = min(split, len(rows))
    answers = [int(place >= split) for place in range(len(rows))]
    total = policy_loss(bundle(rows, len(rows), answers), objective(surrogate)).loss
    parts = [part for part in (rows[:split], rows[split:]) if part]
    assert sum(policy_loss(bundle(part, len(rows)), objective(surrogate)).loss.item() for part in parts) == (
        pytest.approx(total.item(), abs=1e-12)
    )


@given(
    differences=st.lists(st.floats(-2, 2, allow_subnormal=False), max_size=20),
    bound=st.floats(0.001, 2),
)
def test_the_second_moment_of_what_is_left_is_within_its_bound(differences: list[float], bound: float) -> None:
    cut = second_moment_cut(torch.tensor(differences, dtype=torch.float64), bound)
    squares = sorted(value * value for value in differences)
    kept = [square for square in squares if square <= cut]
    assert not kept or math.fsum(kept) / len(kept) <= bound * (1 + 1e-9)
    if len(kept) < len(squares):  # with the following tokens it would not be
        beyond = [square for square in squares if square <= squares[len(kept)]]
        assert math.fsum(beyond) / len(beyond) > bound * (1 - 1e-9)


def test_no_tokens_no_loss() -> None:
    for surrogate in Surrogate:
        assert policy_loss(bundle([]), objective(surrogate)).loss.item() == 0.0


@given(logp=logprob, behave=logprob, version=st.integers(1, 20), born=st.integers(0, 19))
def test_loglinear_proximal(logp: float, behave: float, version: int, born: int) -> None:
    """Compare with the formula in versions: v is the version being made, v_b the token's own."""
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
    """After a rollback, tokens can be newer than the head."""
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
    """Averaged over samples of the renormalised distribution, the gradient is that of −A · (the probability of
    everything allowed)."""
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
            answer_N=torch.zeros(1, dtype=torch.long),
            share_N=torch.ones(1, dtype=torch.float64),
            altered_N=torch.ones(1, dtype=torch.bool),
        )
        result = policy_loss(drawn, objective(Surrogate.CLIP, importance_cap=5.0))
        loss = loss + behaviour_N[index].exp() * result.loss
    (found,) = torch.autograd.grad(loss, logits_V, retain_graph=True)
    (wanted,) = torch.autograd.grad(-advantage * logprobs_N.exp().sum(), logits_V)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
