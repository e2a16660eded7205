"""The weights of a model that is divided among ranks, gathered one after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.models.state_dict import names_on_disk, whole_weights
from trainer.parallel.mesh import Ranks
from trainer.parallel.tensor import NamedWeights, whole

_MOST_STACKS = 4
"""Stacks of experts that are kept gathered: a layer has three, and their experts' names alternate on the disk."""


class _Source(NamedTuple):
    """Where a tensor comes from: a pipeline stage, a parameter there, and the place in its first dimension."""

    stage: int
    parameter: str
    place: int | None


class DividedWeights:
    """Weights in the precision of serving, of which no rank has more in memory than it needs for one tensor.

    `described` has the shape and dtype of every tensor by its name on the disk, without memory. Making one is a
    collective, and so are `stream` and `whole`.
    """

    def __init__(self, weights: NamedWeights, ranks: Ranks, dtype: torch.dtype | None) -> None:
        self._weights = dict(weights)
        self._ranks = ranks
        self._dtype = dtype
        self._sources: dict[str, _Source] = {}
        self._stacks: OrderedDict[str, Tensor | None] = OrderedDict()
        self.described: dict[str, Tensor] = {}
        for stage, found in enumerate(ranks.of_stages(self._own())):
            for name, (parameter, index, shape, kind) in found.items():
                if name not in self._sources:
                    self._sources[name] = _Source(stage, parameter, index)
                    self.described[name] = torch.empty(shape, dtype=kind, device="meta")

    def _own(self) -> dict[str, tuple[str, int | None, tuple[int, ...], torch.dtype]]:
        found: dict[str, tuple[str, int | None, tuple[int, ...], torch.dtype]] = {}
        for name, parameter in self._weights.items():
            kind = self._dtype or parameter.dtype
            if "*" not in name:
                found[name] = (name, None, tuple(parameter.shape), kind)
                continue
            for index, each in enumerate(names_on_disk(name, len(parameter))):
                found[each] = (name, index, tuple(parameter.shape[1:]), kind)
        return found

    def stream(self, names: Sequence[str]) -> Iterator[Tensor | None]:
        """Yield whole tensors on the first rank's CPU, and None on other ranks. Every rank must take all of them, in
        this order."""
        for name in names:
            source = self._sources[name]
            mine = None
            if source.stage == self._ranks.stage:
                mine = self._gathered(self._weights[source.parameter], source)
            yield self._ranks.to_first(mine, self.described[name], source.stage)
        self._stacks.clear()

    def _gathered(self, parameter: nn.Parameter, source: _Source) -> Tensor | None:
        """Return a tensor on the rank that leads its stage, None on the stage's other ranks."""
        if source.place is None:
            return self._published(parameter)
        # All ranks of a stage keep the same stacks, if only their names, because they must gather together.
        if source.parameter not in self._stacks:
            self._stacks[source.parameter] = self._published(parameter)
            if len(self._stacks) > _MOST_STACKS:
                self._stacks.popitem(last=False)
        stack = self._stacks[source.parameter]
        return None if stack is None else stack[source.place]

    def _published(self, parameter: nn.Parameter) -> Tensor | None:
        tensor = whole(parameter.detach())
        return tensor.to("cpu", self._dtype).contiguous() if self._ranks.leads_stage else None

    def whole(self) -> Mapping[str, Tensor]:
        """Return copies of all tensors by name on the first rank, {} on others."""
        return whole_weights(self._weights.items(), self._ranks, self._dtype)


PublishedWeights = Mapping[str, Tensor] | DividedWeights
"""Whole weights by name, which only the first rank has, or those that all ranks have together."""


def described(weights: PublishedWeights) -> Mapping[str, Tensor]:
    """Return tensors with the shape and dtype of each weight by name; those of a divided model have no memory."""
    return weights.described if isinstance(weights, DividedWeights) else weights


def bytes_of(weights: PublishedWeights) -> int:
    """Return the bytes of all weights together."""
    return sum(tensor.nbytes for tensor in described(weights).values())
