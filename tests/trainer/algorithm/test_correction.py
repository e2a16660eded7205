"""Compare every correction with its formula in float64, written out answer by answer with plain ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.correction import importance_weight, vetoed
from trainer.algorithm.objective import BOUNDS, Objective
from trainer.config import Correction, Surrogate

CAP = 2.0
ratios = st.floats(0.05, 20)
answers = st.lists(st.lists(ratios, min_size=1, max_size=5), max_size=5)
lows, highs = st.just(0.0) | st.floats(0.1, 1), st.floats(1, 8)


def objective(
    correction: Correction, low: float | None = None, high: float | None = None, veto: float | None = None
) -> Objective:
    return Objective(
        surrogate=Surrogate.CLIP,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None,
        gate_positive=1.0,
        gate_negative=1.05,
        importance_cap=CAP,
        correction=correction,
        correction_low=low,
        correction_high=high,
        veto=veto,
    )


def weights(
    chosen: Objective,
    given_: Sequence[Sequence[float]],
    altered: Sequence[bool] = (),
    advantages: Sequence[float] | None = None,
) -> list[float]:
    ratio_N = torch.tensor([ratio for answer in given_ for ratio in answer], dtype=torch.float64)
    answer_N = torch.tensor([place for place, answer in enumerate(given_) for _ in answer], dtype=torch.long)
    altered_N = torch.tensor(altered or [False] * len(ratio_N), dtype=torch.bool)
    advantages_N = None if advantages is None else torch.tensor(advantages, dtype=torch.float64)
    return list(importance_weight(chosen, ratio_N.log(), answer_N, altered_N, advantages_N).tolist())


def token_truncate(answer: Sequence[float], low: float, high: float) -> list[float]:
    return [min(max(ratio, low), high) for ratio in answer]


def token_mask(answer: Sequence[float], low: float, high: float) -> list[float]:
    """IcePop's M(k; α, β) = k if α ≤ k ≤ β, else 0."""
    return [ratio if low <= ratio <= high else 0.0 for ratio in answer]


def sequence_truncate(answer: Sequence[float], low: float, high: float) -> list[float]:
    return [min(max(math.prod(answer), low), high)] * len(answer)


def sequence_mask(answer: Sequence[float], low: float, high: float) -> list[float]:
    product = math.prod(answer)
    return [product if low <= product <= high else 0.0] * len(answer)


def geometric_mask(answer: Sequence[float], low: float, high: float) -> list[float]:
    mean = math.prod(answer) ** (1 / len(answer))
    return [min(ratio, CAP) if low <= mean <= high else 0.0 for ratio in answer]


REFERENCES: dict[Correction, Callable[[Sequence[float], float, float], list[float]]] = {
    Correction.TRUNCATE: token_truncate,
    Correction.SIGNED_TRUNCATE: token_truncate,
    Correction.MASK: token_mask,
    Correction.SEQUENCE_TRUNCATE: sequence_truncate,
    Correction.SEQUENCE_MASK: sequence_mask,
    Correction.GEOMETRIC_MASK: geometric_mask,
}


def near_an_edge(answer: Sequence[float], *edges: float) -> bool:
    product = math.prod(answer)
    judged = [*answer, product, product ** (1 / len(answer))]
    return any(abs(value - edge) < 1e-9 * max(1.0, edge) for value in judged for edge in edges)


@pytest.mark.parametrize("correction", list(REFERENCES))
@given(given_=answers, low=lows, high=highs)
def test_weights_equal_the_formula(
    correction: Correction, given_: list[list[float]], low: float, high: float
) -> None:
    if any(near_an_edge(answer, low, high) for answer in given_):
        return
    wanted = [weight for answer in given_ for weight in REFERENCES[correction](answer, low, high)]
    found = weights(objective(correction, low, high), given_)
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("correction", list(Correction))
@given(rows=st.lists(st.tuples(ratios, st.sampled_from([-1.5, 0.0, 0.5]), st.booleans()), max_size=8), low=lows)
def test_only_the_signed_truncation_depends_on_advantages(
    correction: Correction, rows: list[tuple[float, float, bool]], low: float
) -> None:
    """Tokens with a positive advantage weigh clip(ρ, 1, cap), others clip(ρ, low, cap), altered ones min(ρ, cap)."""
    given_, advantages = [[ratio] for ratio, _, _ in rows], [advantage for _, advantage, _ in rows]
    altered = [is_altered for _, _, is_altered in rows]
    chosen = objective(correction, low)
    found = weights(chosen, given_, altered, advantages)
    if correction is not Correction.SIGNED_TRUNCATE:
        assert found == weights(chosen, given_, altered)
        return
    wanted = [
        min(ratio, CAP) if is_altered else min(max(ratio, 1.0 if advantage > 0 else low), CAP)
        for ratio, advantage, is_altered in rows
    ]
    assert found == pytest.approx(wanted, rel=1e-9)


def test_a_token_better_than_its_baseline_has_a_gradient_where_the_policy_forgot_it() -> None:
    """The truncated ratio is almost 0 there, so nothing would bring the policy back."""
    forgotten, advantages = [[1e-4], [1e-4]], [1.0, -1.0]
    assert weights(objective(Correction.TRUNCATE), forgotten, (), advantages) == pytest.approx([1e-4, 1e-4])
    assert weights(objective(Correction.SIGNED_TRUNCATE), forgotten, (), advantages) == pytest.approx([1.0, 1e-4])


@given(given_=answers)
def test_correction_none_gives_every_token_weight_one(given_: list[list[float]]) -> None:
    assert weights(objective(Correction.NONE), given_) == [1.0] * sum(map(len, given_))


@pytest.mark.parametrize(
    "correction", [Correction.TRUNCATE, Correction.SIGNED_TRUNCATE, Correction.SEQUENCE_TRUNCATE]
)
def test_a_truncation_without_bounds_is_bounded_by_the_cap(correction: Correction) -> None:
    assert weights(objective(correction), [[0.01], [7.0]]) == pytest.approx([0.01, CAP])


@pytest.mark.parametrize("correction", list(BOUNDS))
def test_a_mask_without_bounds_has_those_of_its_paper(correction: Correction) -> None:
    low, high = BOUNDS[correction]
    inside, outside = [(1 + high) / 2], [high * 1.01]
    assert [weight > 0 for weight in weights(objective(correction), [inside, outside])] == [True, False]
    if low > 0:
        assert weights(objective(correction), [[low * 0.99]]) == [0.0]


@pytest.mark.parametrize("correction", list(Correction))
@given(given_=answers, veto=st.floats(0.06, 0.9))
def test_a_veto_leaves_out_only_answers_with_a_catastrophic_token(
    correction: Correction, given_: list[list[float]], veto: float
) -> None:
    if any(near_an_edge(answer, veto) for answer in given_):
        return
    without = iter(weights(objective(correction), given_))
    wanted = [next(without) if min(answer) >= veto else 0.0 * next(without) for answer in given_ for _ in answer]
    assert weights(objective(correction, veto=veto), given_) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("correction", list(Correction))
@given(given_=answers, ratio=ratios, veto=st.none() | st.just(0.5))
def test_an_altered_token_has_its_truncated_ratio_and_affects_no_other(
    correction: Correction, given_: list[list[float]], ratio: float, veto: float | None
) -> None:
    """The answer is judged as if the token were not there."""
    chosen = objective(correction, veto=veto)
    own = [2.0, 0.9]
    alone = weights(chosen, [own, *given_])
    altered = [True, False, False] + [False] * sum(map(len, given_))
    found = weights(chosen, [[ratio, *own], *given_], altered)
    is_in = veto is None or min(own) >= veto
    assert found[0] == pytest.approx(min(ratio, CAP) if is_in else 0.0)
    assert found[1:] == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("correction", list(Correction))
def test_ratios_beyond_what_floats_hold_give_finite_weights(correction: Correction) -> None:
    """Long answers multiply to values above and below the range of float32."""
    logratio_N = torch.tensor([90.0, 90.0, -200.0, 0.0])
    answer_N = torch.tensor([0, 0, 1, 1])
    found_N = importance_weight(objective(correction), logratio_N, answer_N, torch.zeros(4, dtype=torch.bool))
    assert found_N.isfinite().all()


def test_weights_have_no_gradient() -> None:
    logratio_N = torch.tensor([0.1], requires_grad=True)
    found_N = importance_weight(objective(Correction.TRUNCATE), logratio_N, torch.tensor([0]), torch.tensor([False]))
    assert not found_N.requires_grad


def test_veto_compares_the_smallest_ratio_of_an_answer() -> None:
    logratio_N = torch.tensor([0.0, -12.0, 0.0, -9.0])
    assert vetoed(logratio_N, torch.tensor([0, 0, 1, 1]), 1e-4).tolist() == [0.0, 0.0, 1.0, 1.0]
