from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config import Precision
from trainer.errors import WeightsUnusable
from trainer.models.huggingface import load_transformer
from trainer.models.state_dict import put_weights
from trainer.models.value import ValueModel, load_value


@pytest.fixture
def model(tiny_model: Path) -> ValueModel:
    return load_value(tiny_model, Precision.FLOAT32, activation_checkpointing=False)


def values(model: ValueModel, *sequences: list[int]) -> torch.Tensor:
    """Return the values at every position of the sequences, laid out one after another in one row."""
    ids = [token for sequence in sequences for token in sequence]
    positions = [place for sequence in sequences for place in range(len(sequence))]
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids]), torch.tensor([positions]), torch.arange(len(ids)))
    return found


def test_a_critic_starts_at_zero_everywhere(model: ValueModel) -> None:
    assert values(model, [1, 2, 3], [4, 5]).tolist() == [0.0] * 5


def test_a_value_is_the_head_over_the_last_state_in_any_packing(model: ValueModel, tiny_model: Path) -> None:
    torch.nn.init.normal_(model.value_head.weight)
    torch.nn.init.constant_(model.value_head.bias, 0.5)
    inner: Any = load_transformer(tiny_model, activation_checkpointing=False).eval()
    wanted = []
    for sequence in ([1, 2, 3, 9], [4, 5]):
        with torch.no_grad():
            hidden_TD = inner(torch.tensor([sequence]), output_hidden_states=True).hidden_states[-1][0]
            wanted.append((hidden_TD.double() @ model.value_head.weight.double().T)[:, 0] + 0.5)
    torch.testing.assert_close(values(model, [1, 2, 3, 9], [4, 5]).double(), torch.cat(wanted), atol=1e-5, rtol=1e-5)


def test_a_critics_weights_are_the_transformers_and_the_head(model: ValueModel, tiny_model: Path) -> None:
    inner: Any = load_transformer(tiny_model, activation_checkpointing=False)
    weights = dict(model.named_weights())
    assert weights.keys() == {*dict(inner.named_parameters()), "value_head.weight", "value_head.bias"}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    model.begin_anew()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_weights())
    with pytest.raises(WeightsUnusable, match=r"the state: value_head.bias should have shape \(1,\), found nothing"):
        put_weights(model.named_weights(), {name: before[name] for name in before if "bias" not in name}, "the state")
