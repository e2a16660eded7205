"""Copies of a model's weights for publication."""

from __future__ import annotations

import torch
from torch import nn

from trainer.models.state_dict import gather_weights


def test_copies_are_made_in_the_memory_of_earlier_ones_where_these_fit() -> None:
    named = [("a", nn.Parameter(torch.randn(3, 4))), ("e.*.b", nn.Parameter(torch.randn(2, 5)))]
    first = gather_weights(named, keep=True, dtype=torch.bfloat16)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    assert places.keys() == {"a", "e.0.b", "e.1.b"}
    with torch.no_grad():
        for _, parameter in named:
            parameter.add_(1)
    second = gather_weights(named, keep=True, dtype=torch.bfloat16, into=first)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    fresh = gather_weights(named, keep=True, dtype=torch.bfloat16)
    assert all(torch.equal(second[name], tensor) for name, tensor in fresh.items())
    other = gather_weights(named, keep=True, dtype=torch.float32, into=second)
    assert all(tensor.dtype is torch.float32 for tensor in other.values())
    assert all(tensor.data_ptr() not in places.values() for tensor in other.values())
    assert second["a"].dtype is torch.bfloat16
