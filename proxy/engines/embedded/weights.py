"""Read weights and put them into a served model. All of them are checked before anything changes."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load, load_file

from proxy.engines.common.wire import RequestRefused


class WeightsRefused(RequestRefused):
    """The new weights do not fit or cannot be read. The served weights are unchanged."""


def read_directory(path: str) -> dict[str, torch.Tensor]:
    """Return all tensors in the `*.safetensors` files of a directory or a Hugging Face repository.

    Raises WeightsRefused.
    """
    directory = Path(path)
    if not directory.is_dir():
        directory = _download(path)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsRefused(f"there are no *.safetensors files in {path}")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise WeightsRefused(f"cannot read {file}: {error}") from error
    return tensors


def _download(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors"]))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise WeightsRefused(
            f"{name} is neither a directory nor a repository that can be fetched: {error}"
        ) from error


def read_serialized(blobs: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors in base64 texts, each a whole safetensors file. Raises WeightsRefused."""
    tensors: dict[str, torch.Tensor] = {}
    for blob in blobs:
        try:
            tensors.update(load(base64.b64decode(blob, validate=True)))
        except (binascii.Error, ValueError, SafetensorError) as error:
            raise WeightsRefused(
                f"serialized_named_tensors must be base64 texts of safetensors files; this engine takes no pickles "
                f"({error})"
            ) from error
    return tensors


def check(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], *, complete: bool) -> None:
    """Raise WeightsRefused unless names and shapes are the model's and, if `complete`, no tensor is missing.

    One of several tied tensors is enough; if more are given, they must be equal.
    """
    own = model.state_dict()
    unknown = sorted(set(tensors) - set(own))
    if unknown:
        raise WeightsRefused(f"the model has no tensors called {_some(unknown)}")
    wrong = [
        f"{name} ({list(tensor.shape)} instead of {list(own[name].shape)})"
        for name, tensor in tensors.items()
        if tensor.shape != own[name].shape
    ]
    if wrong:
        raise WeightsRefused(f"tensors have other shapes: {_some(wrong)}")
    for names in _tied(own):
        given = [name for name in names if name in tensors]
        if complete and not given:
            raise WeightsRefused(f"the tensor {names[0]} is missing")
        if any(not torch.equal(tensors[given[0]], tensors[name]) for name in given[1:]):
            raise WeightsRefused(f"{', '.join(given)} are one tensor in this model and differ in the new weights")


class NewWeights:
    """Checked weights in memory of their own, ready to take the place of a model's.

    To have a model take them costs the same few microseconds per tensor for any size. Until `release`, the tensors
    that they replaced stay in memory, because releasing gigabytes takes milliseconds.
    """

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs

    def put(self) -> None:
        """Exchange the tensors of the model for the new ones."""
        for own, new in self._pairs:
            # The parameter stays the same object: tied modules share it, and adapted layers refer to it.
            own.data, new.data = new.data, own.data

    def release(self) -> None:
        """Give back the memory of the tensors that the model does not use."""
        self._pairs.clear()


def prepare(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], *, complete: bool) -> NewWeights:
    """Check new weights, and copy them into memory of their own in the dtype and on the device of the model.

    The copy is needed even if nothing is converted: `read_directory` maps files, which may be removed or cut later.
    Raises WeightsRefused as `check` does. The model may compute meanwhile.
    """
    check(model, tensors, complete=complete)
    own = model.state_dict(keep_vars=True)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for names in _tied(own):
            given = next((tensors[name] for name in names if name in tensors), None)
            if given is not None:
                new = torch.empty_like(own[names[0]], requires_grad=False).copy_(given)
                distinct = {id(own[name]): own[name] for name in names}
                pairs += [(each, new.detach()) for each in distinct.values()]
    return NewWeights(pairs)


def checksums(model: torch.nn.Module) -> dict[str, str]:
    """Return the checksum of every tensor by its name, as SGLang computes it on a CPU: the first 8 bytes of the
    SHA-256 over its bytes, in hexadecimal digits."""
    found = {}
    for name, tensor in model.state_dict().items():
        content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found[name] = hashlib.sha256(content).hexdigest()[:16]
    return found


def _tied(own: Mapping[str, torch.Tensor]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in own.items():
        groups.setdefault(tensor.data_ptr(), []).append(name)
    return list(groups.values())


def _some(names: list[str], shown: int = 4) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
