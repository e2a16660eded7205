"""Engines that are wrong on purpose. Each records the log-probabilities of the distribution that it really
samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]

NOISE = 1.0
"""Standard deviation of the error of each logit, drawn independently for each token."""
STEP = 0.07
"""Distance of neighbouring 8-bit numbers, which are -128 to 127 times it. The model's largest weights are below 1. At
0.06 the policy with rounded weights acts almost like the original, at 0.08 it solves no task to learn from."""


class Engine:
    """The correct engine: it serves the weights that it is given."""

    def __init__(self, model: Any, seed: int) -> None:
        self.config = model.config
        self._model = model
        self._numbers = torch.Generator().manual_seed(seed)

    def load(self, weights: Weights) -> None:
        self._model.load_state_dict(dict(weights), strict=False)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)


class NoisyEngine(Engine):
    def __call__(self, **inputs: Any) -> Any:
        output = super().__call__(**inputs)
        output.logits = output.logits + NOISE * torch.randn(output.logits.shape, generator=self._numbers)
        return output


class RoundedEngine(Engine):
    def load(self, weights: Weights) -> None:
        super().load({name: _in_8_bits(weight) for name, weight in weights.items()})


class StaleEngine(Engine):
    """Keeps the first weights that it is given, and reports every later version as the one that it serves."""

    _loaded = False

    def load(self, weights: Weights) -> None:
        if not self._loaded:
            super().load(weights)
        self._loaded = True


def _in_8_bits(weight: Tensor) -> Tensor:
    """Return the weight rounded to 8-bit fixed-point numbers. Norms are unchanged, as in quantised engines."""
    return weight if weight.dim() < 2 else (weight / STEP).round().clamp(-128, 127) * STEP


ENGINES: dict[str, Callable[[Any, int], Engine]] = {
    "clean": Engine,
    "noise": NoisyEngine,
    "eight_bits": RoundedEngine,
    "stale": StaleEngine,
}
"""Engines by the name of the fault; `clean` has none."""
