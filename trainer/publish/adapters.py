"""An adapter's files, as peft has them, and the whole weights that it makes of its base."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import WeightsUnusable
from trainer.models.state_dict import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_weights

_NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")


def save_adapter(tensors: Mapping[str, Tensor], config: Mapping[str, Any], base_model: str, directory: Path) -> None:
    """Writes what `PeftModel.from_pretrained` reads. The same tensors give the same safetensors."""
    from safetensors.torch import save_file

    save_file(dict(tensors), directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    told = {**config, "base_model_name_or_path": _lasting(base_model)}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


def merged(tensors: Mapping[str, Tensor], config: Mapping[str, Any], base: Path) -> dict[str, Tensor]:
    """The weights of the base with W + alpha / rank · B A in the place of every adapted W, float32.

    Raises WeightsUnusable where the base is not what the adapter is over.
    """
    weights = {name: weight.float() for name, weight in read_weights(base).items()}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := _NAME.fullmatch(name)) is None:
            raise WeightsUnusable(f"{name} is no weight of a low-rank adapter")
        parts.setdefault(match["layer"], {})[match["part"]] = tensor.float()
    scale = config["lora_alpha"] / config["r"]
    for layer, part in parts.items():
        weight = weights.get(f"{layer}.weight")
        if weight is None or set(part) != {"A", "B"} or weight.shape != (part["B"].shape[0], part["A"].shape[1]):
            raise WeightsUnusable(f"{base}: the adapter does not fit its {layer}")
        weights[f"{layer}.weight"] = torch.addmm(weight, part["B"], part["A"], alpha=scale)
    return weights


def _lasting(base_model: str) -> str:
    """A directory by its absolute path; a Hugging Face id as it is."""
    directory = Path(base_model)
    return str(directory.resolve()) if directory.is_dir() else base_model
