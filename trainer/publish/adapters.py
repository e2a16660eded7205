"""Write an adapter's files in peft's format, and merge an adapter into its base model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from proxy.contract.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, merged_weights
from trainer.errors import WeightsUnusable
from trainer.models.state_dict import read_weights
from trainer.publish.shards import write_file


def save_adapter(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], base_model: str, directory: Path
) -> dict[str, str]:
    """Write the files that `PeftModel.from_pretrained` reads. Equal tensors give equal safetensors. Return the
    SHA-256 of the weights by the name of their file."""
    sha256 = write_file(tensors, list(tensors), directory / ADAPTER_WEIGHTS)
    config = {**config, "base_model_name_or_path": _absolute(base_model)}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return {ADAPTER_WEIGHTS: sha256}


def merged(tensors: Mapping[str, Tensor], config: Mapping[str, Any], base: Path) -> dict[str, Tensor]:
    """Return the weights of the base model with the adapter merged, all float32.

    Raises WeightsUnusable if the adapter does not fit the base model.
    """
    try:
        weights = merged_weights(read_weights(base), tensors, config)
    except ValueError as error:
        raise WeightsUnusable(f"{base}: {error}") from error
    return {name: weight.float() for name, weight in weights.items()}


def _absolute(base_model: str) -> str:
    """Return a directory as its absolute path, and a Hugging Face id unchanged."""
    directory = Path(base_model)
    return str(directory.resolve()) if directory.is_dir() else base_model
