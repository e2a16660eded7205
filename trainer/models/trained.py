"""The trained weights behind published ones of a lower precision.

A step at a small learning rate moves a weight by less than bfloat16 resolves. So the weights that are trained are
part of the trainer state when others are published, and a restart goes on from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.errors import WeightsUnusable
from trainer.parallel.tensor import NamedWeights, like

TRAINED = "weights"
"""The place of the trained weights in a trainer state."""
_DTYPE = "weights_published_as"
_DTYPES = {"bfloat16": torch.bfloat16}


def capture_trained(weights: NamedWeights, published: torch.dtype | None) -> dict[str, Any]:
    """Return the part of a trainer state with the weights as they are trained, without copies; nothing if they are
    published in the same dtype (or None: as they are)."""
    held = {name: parameter.detach() for name, parameter in weights}
    if published is None or all(tensor.dtype == published for tensor in held.values()):
        return {}
    return {TRAINED: held, _DTYPE: str(published).removeprefix("torch.")}


def restore_trained(weights: NamedWeights, state: Mapping[str, Any]) -> None:
    """Replace loaded weights by the trained ones of a state, where these round to them.

    The published weights decide: the state may be that of an earlier version, and then a weight that moved since is
    known only as it was published. Raises WeightsUnusable for a state of other weights.
    """
    trained = state.get(TRAINED)
    if not isinstance(trained, Mapping):
        return
    dtype = _DTYPES.get(str(state.get(_DTYPE)))
    if dtype is None:
        raise WeightsUnusable(f"the trainer state is of weights published as {state.get(_DTYPE)!r}, which is unknown")
    with torch.no_grad():
        for name, parameter in weights:
            tensor = trained.get(name)
            if not isinstance(tensor, Tensor) or tensor.shape != parameter.shape:
                raise WeightsUnusable(f"the trainer state has no trained weights of {name}, or of another shape")
            exact = like(tensor, parameter)
            published = exact.to(dtype).to(parameter.dtype)
            parameter.copy_(torch.where(published == parameter, exact, parameter))
