from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithm.value_loss import explained_variance, value_loss

numbers = st.floats(-3, 3)
tokens = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6)


def reference(value: float, before: float, wanted: float, clip: float | None) -> tuple[float, float]:
    """Return (loss, its derivative) of one token, by cases."""
    plain = (value - wanted) ** 2 / 2
    if clip is None or abs(value - before) <= clip:
        return plain, value - wanted
    near = before + (clip if value > before else -clip)
    bounded = (near - wanted) ** 2 / 2
    return (plain, value - wanted) if plain >= bounded else (bounded, 0.0)


@given(tokens=tokens, clip=st.none() | st.floats(0.05, 1))
def test_loss_and_gradient_equal_the_definition(tokens: list[tuple[float, float, float]], clip: float | None) -> None:
    columns = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    values_N = columns[0].clone().requires_grad_(True)
    share_N = torch.linspace(0.1, 1, len(tokens), dtype=torch.float64)
    loss = value_loss(values_N, columns[1], columns[2], share_N, clip)
    (gradient_N,) = torch.autograd.grad(loss, values_N)
    wanted = [reference(*each, clip) for each in tokens]
    terms = zip(wanted, share_N.tolist(), strict=True)
    assert loss.item() == pytest.approx(sum(share * each for (each, _), share in terms), abs=1e-9)
    for (value, before, wanted_return), (_, slope), share, found in zip(
        tokens, wanted, share_N.tolist(), gradient_N.tolist(), strict=True
    ):
        near = before + max(-(clip or 9), min(clip or 9, value - before))
        if abs(abs(value - wanted_return) - abs(near - wanted_return)) > 1e-6 or near == value:  # away from the kink
            assert found == pytest.approx(share * slope, abs=1e-9)


@given(returns=st.lists(numbers, min_size=2, max_size=8), shift=numbers)
def test_explained_variance(returns: list[float], shift: float) -> None:
    returns_N = torch.tensor(returns, dtype=torch.float64)
    if returns_N.var(correction=0) < 1e-3:
        assert explained_variance(returns_N, torch.full_like(returns_N, 2.0)) == 0.0
        return
    assert explained_variance(returns_N + shift, returns_N) == pytest.approx(1)
    assert explained_variance(torch.full_like(returns_N, shift), returns_N) == pytest.approx(0, abs=1e-9)
    assert explained_variance(-returns_N, returns_N) == pytest.approx(-3)
