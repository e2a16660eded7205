"""Move weights between a model, possibly sharded, and files in Hugging Face's format.

A weight with `*` in its name is one tensor in memory and several on the disk, one for each index of its first
dimension, with the index in place of the `*`: for example the weights of experts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from proxy.contract.lora import ADAPTER_CONFIG
from trainer.errors import WeightsUnusable
from trainer.models.stored import StoredTensors, weight_files
from trainer.parallel.mesh import Ranks
from trainer.parallel.tensor import NamedWeights, like, local_region, whole


def gather_weights(
    weights: NamedWeights,
    *,
    keep: bool,
    dtype: torch.dtype | None = None,
    into: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return whole copies on the CPU by their names on the disk, in `dtype` if one is given. A collective; ranks
    without `keep` return {}.

    Copies are made in the memory of the tensors in `into` where these have the right shape and dtype: the first touch
    of new memory takes twice as long as the copy itself.
    """
    gathered: dict[str, Tensor] = {}
    for name, parameter in weights:
        tensor = whole(parameter.detach())
        if keep:
            parts = tensor.unbind(0) if "*" in name else (tensor,)
            for on_disk, part in zip(names_on_disk(name, len(parts)), parts, strict=True):
                room = into.get(on_disk)
                if room is not None and (room.shape, room.dtype) == (part.shape, dtype or part.dtype):
                    gathered[on_disk] = room.copy_(part)
                else:
                    gathered[on_disk] = part.to("cpu", dtype, copy=True).contiguous()
    return gathered


def whole_weights(
    weights: NamedWeights,
    ranks: Ranks,
    dtype: torch.dtype | None = None,
    into: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return `gather_weights` of all pipeline stages together on the first rank, and {} on the others. A
    collective."""
    return ranks.join_stages(gather_weights(weights, keep=ranks.leads_stage, dtype=dtype, into=into))


def names_on_disk(name: str, count: int) -> list[str]:
    """Return the names on the disk of a weight whose first dimension has `count` entries."""
    return [name.replace("*", str(index)) for index in range(count)] if "*" in name else [name]


def save_weights(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write the safetensors of a version. Equal tensors give equal bytes."""
    from safetensors.torch import save_file

    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read a version's weights by name. Raises WeightsUnusable."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    stored: dict[str, Tensor] = {}
    try:
        for file in weight_files(directory):
            stored.update(load_file(file))
    except (OSError, SafetensorError) as error:
        raise WeightsUnusable(f"{directory}: {error}") from error
    return stored


def load_weights(weights: NamedWeights, directory: Path) -> None:
    """Copy a version's weights into a model, sharded or not. Every rank reads its own part of the files, with the
    memory of one block.

    Raises WeightsUnusable if a weight is missing or has another shape.
    """
    stored = StoredTensors(directory)
    shapes = stored.shapes
    with torch.no_grad():
        for name, parameter in weights:
            _check_shapes(name, parameter, shapes, str(directory))
            part, offsets = local_region(parameter)
            if "*" not in name:
                stored.read_into(name, part, offsets)
                continue
            here = names_on_disk(name, len(parameter))[offsets[0] : offsets[0] + len(part)]
            for place, each in enumerate(here):
                stored.read_into(each, part[place], offsets[1:])


def put_weights(weights: NamedWeights, stored: Mapping[str, Tensor], place: str) -> None:
    """Copy whole tensors into a model, sharded or not.

    Raises WeightsUnusable, with `place` as their origin, if a tensor is missing or has another shape.
    """
    shapes = {each: tuple(tensor.shape) for each, tensor in stored.items()}
    with torch.no_grad():
        for name, parameter in weights:
            _check_shapes(name, parameter, shapes, place)
            tensor = (
                torch.stack([stored[each] for each in names_on_disk(name, len(parameter))])
                if "*" in name
                else stored[name]
            )
            parameter.copy_(like(tensor, parameter))


def _check_shapes(name: str, parameter: Tensor, stored: Mapping[str, tuple[int, ...]], place: str) -> None:
    shape = tuple(parameter.shape[1:] if "*" in name else parameter.shape)
    for each in names_on_disk(name, len(parameter)):
        if stored.get(each) != shape:
            raise WeightsUnusable(f"{place}: {each} should have shape {shape}, found {stored.get(each, 'nothing')}")


ADAPTER_DIRECTORY = "adapter"
"""The folder of a merged version that contains its adapter."""


def adapter_in(directory: Path) -> dict[str, Any] | None:
    """Read peft's configuration of the adapter in a directory; None if it holds none. Raises WeightsUnusable."""
    try:
        found: dict[str, Any] = json.loads((directory / ADAPTER_CONFIG).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise WeightsUnusable(f"{directory / ADAPTER_CONFIG}: {error}") from error
    return found


def joint_digest(sums: Mapping[str, str]) -> str:
    """Return the digest of a version from the SHA-256 of its safetensors files by name: that of a single file, or
    the SHA-256 of all of them in order of their names."""
    if len(sums) == 1:
        return next(iter(sums.values()))
    return hashlib.sha256("".join(sums[name] for name in sorted(sums)).encode()).hexdigest()


def digest(directory: Path) -> tuple[str, int]:
    """Return (SHA-256 of the bytes of all safetensors files in order of their names, total size in bytes): how a
    version without a list of files is checked, which is older than that list."""
    sha256 = hashlib.sha256()
    size = 0
    for file in weight_files(directory):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha256.update(block)
                size += len(block)
    return sha256.hexdigest(), size


def config_of_dtype(config: Mapping[str, object], dtype: str) -> dict[str, object]:
    """Return a model's `config.json` for weights stored in `dtype`, whatever the dtype of the base model's files."""
    changed = dict(config)
    changed["dtype"] = dtype
    if "torch_dtype" in changed:
        changed["torch_dtype"] = dtype
    return changed
