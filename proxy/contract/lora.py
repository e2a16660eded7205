"""The files of a LoRA adapter as peft writes them, and the arithmetic that merges one into its base model.

An adapted linear layer computes W x + alpha / r · B (A x), with A of shape (r, in) and B of shape (out, r). Trainer,
proxy and embedded engine agree on the names and the formula here. Tensors are those of the caller's library: this
module imports none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ADAPTER_CONFIG = "adapter_config.json"
"""peft's configuration; a directory with this file holds an adapter."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PART = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
"""The name of a tensor in `ADAPTER_WEIGHTS`. `layer` is the name of the adapted layer in the base model."""


def merged_weights(base: Mapping[str, Any], adapter: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of `base` with W + alpha / r · B A for every adapted W, computed and returned as float32.

    `base` and `adapter` map names to torch tensors; `config` has `lora_alpha` and `r`. Weights without an adapter are
    returned as they are. Raises ValueError if the adapter does not fit the base model.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in adapter.items():
        if (match := ADAPTER_PART.fullmatch(name)) is None:
            raise ValueError(f"{name} is not a weight of a LoRA adapter of linear layers")
        parts.setdefault(match["layer"], {})[match["part"]] = tensor.float()
    weights = dict(base)
    scale = config["lora_alpha"] / config["r"]
    for layer, part in parts.items():
        weight = weights.get(f"{layer}.weight")
        if weight is None or set(part) != {"A", "B"} or weight.shape != (part["B"].shape[0], part["A"].shape[1]):
            raise ValueError(f"the adapter does not fit {layer} of the base model")
        weights[f"{layer}.weight"] = weight.float().addmm(part["B"], part["A"], alpha=scale)
    return weights
