"""A low-rank adapter as peft writes it, made whole: the weights of the model it is over, with its difference added.

Always from the base's own files, so what is served does not depend on what was served before.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from proxy.engines.embedded.weights import WeightsRefused, read_directory

CONFIG = "adapter_config.json"
NAME = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")

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
"""What the difference is computed for; whatever else an adapter's configuration asks for is refused."""


def holds_adapter(path: str) -> bool:
    return (Path(path) / CONFIG).is_file()


def read_adapted(path: str) -> dict[str, torch.Tensor]:
    """All tensors of the base that the adapter names, with W + alpha / r · B A in the place of each adapted W, which
    are float32. Raises WeightsRefused."""
    config = _config(Path(path))
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str):
        raise WeightsRefused(f"{path}: its {CONFIG} names no base model")
    tensors = read_directory(base)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in read_directory(path).items():
        if (match := NAME.fullmatch(name)) is None:
            raise WeightsRefused(f"{path}: {name} is no weight of a low-rank adapter of linear layers")
        parts.setdefault(match["layer"], {})[match["part"]] = tensor.float()
    scale = config["lora_alpha"] / config["r"]
    for layer, part in parts.items():
        weight = tensors.get(f"{layer}.weight")
        if weight is None or set(part) != {"A", "B"} or weight.shape != (part["B"].shape[0], part["A"].shape[1]):
            raise WeightsRefused(f"{path}: the adapter does not fit {layer} of {base}")
        tensors[f"{layer}.weight"] = torch.addmm(weight.float(), part["B"], part["A"], alpha=scale)
    return tensors


def _config(directory: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((directory / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise WeightsRefused(f"cannot read {directory / CONFIG}: {error}") from error
    other = [f"{key} = {config.get(key)!r}" for key, plain in PLAIN.items() if config.get(key) not in plain]
    if other:
        raise WeightsRefused(
            f"{directory}: this engine takes plain LoRA adapters, and this one has {', '.join(other)}"
        )
    sizes = (config.get("r"), config.get("lora_alpha"))
    if not all(isinstance(size, int | float) and size > 0 for size in sizes):
        raise WeightsRefused(f"{directory}: r and lora_alpha are positive numbers, not {sizes[0]!r} and {sizes[1]!r}")
    return config
