"""LoRA adapters over the linear layers of one network, another one for each row of a batch.

Letters in shapes: N rows of a batch, T tokens of a row, R the ranks of the adapters in use together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

Pair = tuple[torch.Tensor, torch.Tensor]
"""A of one layer `[R, in]`, and B transposed and times alpha / r `[R, out]`, both float32."""


class Adapter:
    """One adapter in memory: `pairs` by the name of the adapted layer. It never changes, so requests that run keep
    using it after its name is gone."""

    def __init__(self, name: str, rank: int, pairs: Mapping[str, Pair]) -> None:
        self.name = name
        self.rank = rank
        self.pairs = pairs


Rows = Sequence[Adapter | None]
"""The adapter of every row of a batch; None for the base model alone."""


class AdaptedLayers:
    """The linear layers of a network that adapters can change: `shapes` has `(out, in)` by name.

    Only the model thread calls the methods. For a batch without adapters the network is as if this class did not
    exist.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        self._layers = _linears_by_row(network)
        self.shapes = {name: (layer.out_features, layer.in_features) for name, layer in self._layers.items()}
        self._forwards: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._batch: _Batch | None = None
        self._joined = _Joined(())

    def attach(self, names: Iterable[str]) -> None:
        """Let adapters change these layers."""
        self._replace(None)
        for name in names:
            if name not in self._forwards:
                self._forwards[name] = partial(self._forward, name, self._layers[name])

    def use(self, rows: Rows) -> None:
        """Choose the adapters of the next forward pass; no rows at all mean the base model."""
        if self._batch is not None and self._batch.rows == rows:
            return
        active = tuple(dict.fromkeys(adapter for adapter in rows if adapter is not None))
        if not active:
            self._replace(None)
            return
        joined = self._joined if self._joined.adapters == active else _Joined(active)
        # A prefill of one adapter between two decode steps of several must not cost these their joined tensors.
        if len(active) > 1:
            self._joined = joined
        device = next(iter(self._layers.values())).weight.device
        self._replace(_Batch(rows, joined, device))

    def forget(self, adapter: Adapter) -> None:
        """Release what is remembered of an adapter beyond its own tensors."""
        if self._batch is not None and adapter in self._batch.rows:
            self._replace(None)
        if adapter in self._joined.adapters:
            self._joined = _Joined(())

    def _replace(self, batch: _Batch | None) -> None:
        """Take another batch, and the forward functions of the layers that it needs."""
        if (batch is None) != (self._batch is None):
            for name, forward in self._forwards.items():
                # Another function in the same module: names in the state dict stay those of the files, which another
                # module would change, and every call of a module with a hook costs time, which this costs only with
                # adapters in the batch.
                if batch is None:
                    del self._layers[name].forward
                else:
                    self._layers[name].forward = forward  # type: ignore[method-assign, assignment]
        self._batch = batch

    def _forward(self, name: str, layer: torch.nn.Linear, x_nti: torch.Tensor) -> torch.Tensor:
        """Return the output `[N, T, out]` of a layer with every row's adapter added."""
        output = functional.linear(x_nti, layer.weight, layer.bias)
        batch = self._batch
        if batch is None or (pair := batch.joined.pair(name)) is None:
            return output
        a_ri, b_ro = pair
        low_ntr = functional.linear(x_nti.float(), a_ri)
        if batch.foreign_n1r is not None:
            # Filled and not multiplied by 0: another adapter's overflow would become NaN in this row.
            low_ntr = low_ntr.masked_fill(batch.foreign_n1r, 0.0)
        sum_ = torch.addmm(output.float().flatten(0, 1), low_ntr.flatten(0, 1), b_ro)
        return sum_.view_as(output).to(output.dtype)


class _Joined:
    """Several adapters as one of the sum of their ranks: two matrix products serve them all, where a loop over the
    adapters would cost two for each one, in every layer."""

    def __init__(self, adapters: tuple[Adapter, ...]) -> None:
        self.adapters = adapters
        self._pairs: dict[str, Pair | None] = {}

    def pair(self, name: str) -> Pair | None:
        """Return the pair of a layer; None if no adapter changes the layer."""
        if len(self.adapters) == 1:
            return self.adapters[0].pairs.get(name)
        if name not in self._pairs:
            self._pairs[name] = self._join(name)
        return self._pairs[name]

    def _join(self, name: str) -> Pair | None:
        found = [adapter.pairs.get(name) for adapter in self.adapters]
        some = next((pair for pair in found if pair is not None), None)
        if some is None:
            return None
        pairs = [
            pair or tuple(part.new_zeros((adapter.rank, part.shape[1])) for part in some)
            for adapter, pair in zip(self.adapters, found, strict=True)
        ]
        return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


class _Batch:
    """The adapters of one batch. `foreign_n1r` is True where a row must not see a column of the joined rank; None if
    every row has the one adapter."""

    def __init__(self, rows: Rows, joined: _Joined, device: torch.device) -> None:
        self.rows = list(rows)
        self.joined = joined
        self.foreign_n1r: torch.Tensor | None = None
        if any(adapter is not joined.adapters[0] for adapter in rows):
            owners_n = [-1 if adapter is None else joined.adapters.index(adapter) for adapter in rows]
            owners_r = [index for index, adapter in enumerate(joined.adapters) for _ in range(adapter.rank)]
            self.foreign_n1r = torch.tensor(owners_n, device=device)[:, None, None] != torch.tensor(
                owners_r, device=device
            )


def _linears_by_row(network: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return the linear layers whose input is `[N, T, in]`, by name.

    The experts and routers of a mixture get the tokens of all rows in one list, where a row's adapter is lost. A
    small forward pass shows which layers get what.
    """
    found: dict[str, torch.nn.Linear] = {}
    rows, tokens = 2, 3

    def record(name: str, layer: torch.nn.Linear, inputs: tuple[Any, ...], _: object) -> None:
        if inputs and inputs[0].dim() == 3 and inputs[0].shape[0] == rows:
            found[name] = layer

    handles = [
        layer.register_forward_hook(partial(record, name))
        for name, layer in network.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    device = next(network.parameters()).device
    with torch.inference_mode():
        network(input_ids=torch.zeros((rows, tokens), dtype=torch.long, device=device), use_cache=False)
    for handle in handles:
        handle.remove()
    return found
