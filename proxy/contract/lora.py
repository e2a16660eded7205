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

PLAIN_OPTIONS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    **dict.fromkeys(("use_qalora", "use_bdlora"), (False, None)),
    **dict.fromkeys(("alora_invocation_tokens", "layer_replication", "arrow_config", "kasa_config"), (None,)),
}
"""The values of peft's options under which the formula above is the whole adapter. SGLang ignores most of the others
and would serve wrong weights."""


def other_options(config: Mapping[str, Any]) -> list[str]:
    """Return the options of an adapter's configuration that the formula does not cover, as `name = value`."""
    return [f"{key} = {config.get(key)!r}" for key, plain in PLAIN_OPTIONS.items() if config.get(key) not in plain]


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
