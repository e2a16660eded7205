"""Read a LoRA adapter from its directory, to be merged into its base model or to be loaded beside others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from proxy.contract.lora import ADAPTER_CONFIG, ADAPTER_PART, merged_weights, other_options
from proxy.engines.embedded.lora import Adapter, Pair
from proxy.engines.embedded.weights import WeightsRefused, read_directory


def holds_adapter(path: str) -> bool:
    return (Path(path) / ADAPTER_CONFIG).is_file()


def read_adapted(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the base model that the adapter names, with the adapter merged. Adapted weights are
    float32. The base is read from its own files, so the result does not depend on what was served before. Raises
    WeightsRefused."""
    config = _config(Path(path))
    base = _base_of(path, config)
    try:
        return merged_weights(read_directory(base), read_directory(path), config)
    except ValueError as error:
        raise WeightsRefused(f"{path}, over {base}: {error}") from error


def read_adapter(
    name: str,
    path: str,
    *,
    base: str,
    shapes: Mapping[str, tuple[int, int]],
    max_rank: int,
    device: torch.device,
) -> Adapter:
    """Return the adapter in a directory, for layers of these shapes `(out, in)` of the model in `base`.

    Raises WeightsRefused for another base model, a rank above `max_rank`, layers or shapes that the model does not
    have, and numbers that are not finite.
    """
    if not holds_adapter(path):
        raise WeightsRefused(f"{path} is no adapter: there is no {ADAPTER_CONFIG}")
    config = _config(Path(path))
    own = _base_of(path, config)
    if _location(own) != _location(base):
        raise WeightsRefused(f"{path} is an adapter of {own}, and this engine serves {base}")
    rank = config["r"]
    if not isinstance(rank, int) or rank > max_rank:
        raise WeightsRefused(f"{path} is of rank {rank}, and this engine was started with --max-lora-rank {max_rank}")
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for tensor_name, tensor in read_directory(path).items():
        match = ADAPTER_PART.fullmatch(tensor_name)
        if match is None or match["layer"] not in shapes:
            raise WeightsRefused(f"{path}: {tensor_name} belongs to no linear layer that adapters can change")
        parts.setdefault(match["layer"], {})[match["part"]] = tensor
    scale = config["lora_alpha"] / rank
    return Adapter(
        name,
        rank,
        {layer: _pair(path, layer, part, shapes[layer], rank, scale, device) for layer, part in parts.items()},
    )


def _pair(
    path: str,
    layer: str,
    part: Mapping[str, torch.Tensor],
    shape: tuple[int, int],
    rank: int,
    scale: float,
    device: torch.device,
) -> Pair:
    if set(part) != {"A", "B"}:
        raise WeightsRefused(f"{path}: lora_A or lora_B of {layer} is missing")
    for which, wanted in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
        tensor = part[which]
        if tuple(tensor.shape) != wanted or not tensor.is_floating_point():
            raise WeightsRefused(
                f"{path}: lora_{which} of {layer} is {tensor.dtype} {list(tensor.shape)}, and must be floats of the "
                f"shape {list(wanted)}"
            )
        if not tensor.isfinite().all():
            raise WeightsRefused(f"{path}: lora_{which} of {layer} has numbers that are not finite")
    scaled = part["B"].to(device, torch.float32).t() * scale
    return part["A"].to(device, torch.float32), scaled.contiguous()


def _base_of(path: str, config: Mapping[str, Any]) -> str:
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str):
        raise WeightsRefused(f"{path}: its {ADAPTER_CONFIG} names no base model")
    return base


def _location(model: str) -> str:
    """Return one text for the several names of a model: its directory, also for an id in Hugging Face's cache."""
    directory = Path(model)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(model, allow_patterns=["config.json"], local_files_only=True))
        except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
            return model
    return str(directory.resolve())


def _config(directory: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((directory / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsRefused(f"cannot read {directory / ADAPTER_CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise WeightsRefused(f"{directory / ADAPTER_CONFIG} is not a JSON object")
    if other := other_options(config):
        raise WeightsRefused(
            f"{directory}: this engine loads plain LoRA adapters only, and this one has {', '.join(other)}"
        )
    sizes = (config.get("r"), config.get("lora_alpha"))
    if not all(isinstance(size, int | float) and size > 0 for size in sizes):
        raise WeightsRefused(f"{directory}: r and lora_alpha must be positive, not {sizes[0]!r} and {sizes[1]!r}")
    return config
