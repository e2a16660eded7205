"""Load a LoRA adapter by merging it into the weights of its base model.

The base is always read from its own files, so the result does not depend on what was served before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from proxy.contract.lora import ADAPTER_CONFIG, merged_weights
from proxy.engines.embedded.weights import WeightsRefused, read_directory

PLAIN: dict[str, tuple[Any, ...]] = {
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
"""The values of peft's options that the merge computes rightly; an adapter with any other value is refused."""


def holds_adapter(path: str) -> bool:
    return (Path(path) / ADAPTER_CONFIG).is_file()


def read_adapted(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the base model that the adapter names, with the adapter merged. Adapted weights are
    float32. Raises WeightsRefused."""
    config = _config(Path(path))
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str):
        raise WeightsRefused(f"{path}: its {ADAPTER_CONFIG} names no base model")
    try:
        return merged_weights(read_directory(base), read_directory(path), config)
    except ValueError as error:
        raise WeightsRefused(f"{path}, over {base}: {error}") from error


def _config(directory: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((directory / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise WeightsRefused(f"cannot read {directory / ADAPTER_CONFIG}: {error}") from error
    other = [f"{key} = {config.get(key)!r}" for key, plain in PLAIN.items() if config.get(key) not in plain]
    if other:
        raise WeightsRefused(
            f"{directory}: this engine loads plain LoRA adapters only, and this one has {', '.join(other)}"
        )
    sizes = (config.get("r"), config.get("lora_alpha"))
    if not all(isinstance(size, int | float) and size > 0 for size in sizes):
        raise WeightsRefused(f"{directory}: r and lora_alpha must be positive, not {sizes[0]!r} and {sizes[1]!r}")
    return config
