"""Compare the tensors of a version with its base model: names, shapes, and floats against integers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from proxy.contract.lora import ADAPTER_PART, other_options
from proxy.errors import WeightsRejected
from proxy.versions.safetensors import FLOATS, TensorEntry

Tensors = Mapping[str, TensorEntry]

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_BUFFER = re.compile(r"\.(rotary_emb\.inv_freq|masked_bias|attn\.bias)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

_SHOWN = 3


def check_whole(tensors: Tensors, base: Tensors, config: Mapping[str, Any]) -> None:
    """Raise WeightsRejected unless a version of whole weights has the base's tensors. `config` is the base's.

    Floats of different sizes count as equal, because trainers publish float32 over a base in bfloat16.
    """
    unknown = [name for name in tensors if name not in base and not _is_tied_head(name, base, config)]
    if unknown:
        raise WeightsRejected(f"the base model has no tensors called {_some(unknown)}")
    for name, tensor in tensors.items():
        wanted = base.get(name) or next(each for other, each in base.items() if other.endswith(_EMBEDDING))
        if tensor.shape != wanted.shape:
            raise WeightsRejected(
                f"{name} has the shape {list(tensor.shape)} and the base model's has {list(wanted.shape)}"
            )
        if (tensor.dtype in FLOATS) != (wanted.dtype in FLOATS):
            raise WeightsRejected(f"{name} is {tensor.dtype} and the base model's is {wanted.dtype}")
    missing = [name for name in base if name not in tensors and not _may_be_missing(name, tensors, config)]
    if missing:
        raise WeightsRejected(f"tensors of the base model are missing: {_some(missing)}")


def check_adapter(tensors: Tensors, adapter: Mapping[str, Any], base: Tensors | None) -> None:
    """Raise WeightsRejected unless an adapter's tensors agree with its configuration and fit the base's layers.

    An adapter with a wrong shape kills SGLang at the first request, not at the load, and SGLang ignores options of
    peft that it does not know. Without `base`, only tensors and configuration are compared.
    """
    if other := other_options(adapter):
        raise WeightsRejected(f"engines serve plain LoRA adapters only, and this one has {', '.join(other)}")
    rank, alpha = adapter.get("r"), adapter.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1:
        raise WeightsRejected(f"adapter_config.json has the rank {rank!r}: it must be a positive integer")
    if not isinstance(alpha, int | float) or alpha <= 0:
        raise WeightsRejected(f"adapter_config.json has the lora_alpha {alpha!r}: it must be a positive number")
    parts: dict[str, dict[str, TensorEntry]] = {}
    for name, tensor in tensors.items():
        match = ADAPTER_PART.fullmatch(name)
        if match is None or len(tensor.shape) != 2 or tensor.dtype not in FLOATS:
            raise WeightsRejected(f"{name} is not a weight of a low-rank adapter of linear layers")
        parts.setdefault(match["layer"], {})[match["part"]] = tensor
    if not parts:
        raise WeightsRejected("the adapter has no tensors")
    targets = adapter.get("target_modules")
    for layer, part in parts.items():
        if set(part) != {"A", "B"}:
            raise WeightsRejected(f"lora_A or lora_B of {layer} is missing")
        if isinstance(targets, list) and not any(layer == each or layer.endswith(f".{each}") for each in targets):
            raise WeightsRejected(f"{layer} is not one of the adapter's target_modules")
        shape = (part["B"].shape[0], part["A"].shape[1])
        if part["A"].shape[0] != rank or part["B"].shape[1] != rank:
            raise WeightsRejected(f"lora_A and lora_B of {layer} are not of rank {rank}")
        if base is None:
            continue
        weight = base.get(f"{layer}.weight")
        if weight is None or weight.shape != shape:
            wanted = "no such layer" if weight is None else f"{list(weight.shape)}"
            raise WeightsRejected(f"the adapter of {layer} is for {list(shape)}, and the base model has {wanted}")


def check_index(index: Any, files: Mapping[str, Collection[str]]) -> None:
    """Raise WeightsRejected unless `model.safetensors.index.json` maps every tensor to its file: engines load only
    the tensors that it names."""
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise WeightsRejected("model.safetensors.index.json has no weight_map")
    actual = {name: file for file, names in files.items() for name in names}
    if places != actual:
        wrong = [name for name in {**places, **actual} if places.get(name) != actual.get(name)]
        raise WeightsRejected(f"model.safetensors.index.json is wrong about {_some(wrong)}")


def _is_tied_head(name: str, base: Tensors, config: Mapping[str, Any]) -> bool:
    return name == _HEAD and _is_tied(config) and any(other.endswith(_EMBEDDING) for other in base)


def _is_tied(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    return bool(config.get("tie_word_embeddings", isinstance(text, dict) and text.get("tie_word_embeddings")))


def _may_be_missing(name: str, tensors: Tensors, config: Mapping[str, Any]) -> bool:
    """Return whether a version is complete without this tensor of its base's files.

    True for a head tied to the embedding, for buffers that old checkpoints stored, and for layers of multi-token
    prediction, which transformers does not load: `mtp.…`, or numbered beyond the model's layers.
    """
    if name == _HEAD and _is_tied(config):
        return any(other.endswith(_EMBEDDING) for other in tensors)
    layer = _LAYER.search(name)
    layers = config.get("num_hidden_layers")
    beyond = layer is not None and isinstance(layers, int) and int(layer[1]) >= layers
    return beyond or name.startswith("mtp.") or _BUFFER.search(name) is not None


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
