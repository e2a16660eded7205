"""Engines that are wrong on purpose. Each records the log-probabilities of the distribution that it really
samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]

NOISE = 1.5
"""Standard deviation of the error of each logit, drawn independently for each token."""
STEP = 0.05
"""Distance of neighbouring 8-bit numbers, which are -128 to 127 times it. The model's largest weights are below 1. At
0.06 the rounded policy solves no task to learn from."""
LAG = 6
"""Number of versions by which the stale engine is behind the one that it names."""


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
    """Serves the weights that it was given `LAG` loads before, or its first, and names them as the newest version."""

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__(model, seed)
        self._given: deque[Weights] = deque(maxlen=LAG + 1)

    def load(self, weights: Weights) -> None:
        self._given.append({name: weight.clone() for name, weight in weights.items()})
        super().load(self._given[0])


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
