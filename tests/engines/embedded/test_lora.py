"""The arithmetic of adapters by row, on one linear layer inside a small network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proxy.engines.embedded.lora import AdaptedLayers, Adapter

IN, OUT = 6, 5


class Network(torch.nn.Module):
    """`[N, T]` ids through a layer by row, and a layer that sees the tokens of all rows in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, IN)
        self.by_row = torch.nn.Linear(IN, OUT)
        self.flat = torch.nn.Linear(OUT, OUT)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        hidden: torch.Tensor = self.by_row(self.embedding(input_ids))
        return self.flat(hidden.flatten(0, 1)).view_as(hidden)


def adapter(name: str, rank: int, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randn(rank, IN, generator=generator), torch.randn(rank, OUT, generator=generator)
    return Adapter(name, rank, {"by_row": pair})


ADAPTERS = [None, adapter("a", 1, 1), adapter("b", 3, 2), Adapter("elsewhere", 2, {})]


def served(dtype: torch.dtype = torch.float32) -> tuple[AdaptedLayers, torch.nn.Linear]:
    torch.manual_seed(0)
    network = Network().to(dtype)
    layers = AdaptedLayers(network)
    layers.attach(["by_row"])
    layers.attach(["by_row"])  # the second adapter of a layer
    return layers, network.by_row


def expected(layer: torch.nn.Linear, rows: list[Adapter | None], x: torch.Tensor) -> torch.Tensor:
    outputs = []
    for row, of in zip(x, rows, strict=True):
        weight = layer.weight.float()
        if of is not None and "by_row" in of.pairs:
            a, b = of.pairs["by_row"]
            weight = weight + b.t() @ a
        outputs.append(torch.nn.functional.linear(row.float(), weight, layer.bias.float()))
    return torch.stack(outputs)


@given(
    st.lists(st.lists(st.sampled_from(ADAPTERS), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 4)
)
def test_every_row_is_what_its_own_merged_weights_give(batches: list[list[Adapter | None]], tokens: int) -> None:
    layers, layer = served()
    with torch.no_grad():
        for rows in batches:
            x = torch.randn(len(rows), tokens, IN)
            layers.use(rows)
            torch.testing.assert_close(layer(x), expected(layer, rows, x))
            layers.use(())
            torch.testing.assert_close(layer(x), expected(layer, [None] * len(rows), x))


def test_16_bit_layers_add_their_adapters_in_32_bits() -> None:
    layers, layer = served(torch.bfloat16)
    rows = [ADAPTERS[2], None, ADAPTERS[1]]
    with torch.no_grad():
        x = torch.randn(3, 4, IN).to(torch.bfloat16)
        layers.use(rows)
        found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected(layer, rows, x), atol=0.1, rtol=0.02)


def test_an_adapter_that_overflows_does_not_reach_other_rows() -> None:
    layers, layer = served()
    huge = Adapter("huge", 1, {"by_row": (torch.full((1, IN), 3e38), torch.full((1, OUT), 3e38))})
    with torch.no_grad():
        x = torch.ones(3, 2, IN)
        layers.use([huge, ADAPTERS[1], None])
        found = layer(x)
        assert not found[0].isfinite().any()
        torch.testing.assert_close(found[1:], expected(layer, [ADAPTERS[1], None], x[1:]))


def test_a_layer_without_rows_takes_no_adapter() -> None:
    layers, _ = served()
    assert layers.shapes == {"by_row": (OUT, IN)}


@pytest.mark.parametrize("rows", [[ADAPTERS[1]], [ADAPTERS[1], ADAPTERS[2]]])
def test_a_forgotten_adapter_leaves_no_tensor_behind(rows: list[Adapter | None]) -> None:
    layers, layer = served()
    own = adapter("own", 2, 9)
    used = [own, *rows]
    with torch.no_grad():
        layers.use(used)
        layer(torch.randn(len(used), 1, IN))
        layers.use(rows)
        layers.forget(own)
        layers.use(used)
        x = torch.randn(len(used), 1, IN)
        torch.testing.assert_close(layer(x), expected(layer, used, x))
