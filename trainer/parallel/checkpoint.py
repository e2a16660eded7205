"""Optimiser state by parameter name, and a trainer's state on the disk, to which every rank adds what it has.

A state is a tree of plain values and tensors, which may be sharded. Its directory:

```
.metadata, *.distcp   the tensors, as torch.distributed.checkpoint writes them: each shard once, by a rank that has it
state.json            the rest of the tree; written when all ranks are done
```
It is read under any number of ranks, whatever their number was: each reads what it is to have.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from trainer.errors import WeightsUnusable
from trainer.parallel.mesh import Ranks
from trainer.parallel.tensor import NamedWeights, like

OptimizerState = dict[str, dict[str, Tensor]]

INDEX = "state.json"
"""The file that is written last."""

_BETWEEN = "/"


def capture_optimizer(weights: NamedWeights, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """The state of every parameter that has been stepped, as this rank has it. Not copies: the next step changes
    them."""
    states = ((name, optimizer.state.get(parameter)) for name, parameter in weights)
    return {name: dict(state) for name, state in states if state}


def restore_optimizer(
    weights: NamedWeights, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Replaces the optimiser's state by a captured one, whose tensors it takes over where they are sharded as its
    parameters are; an empty one makes it as new. A collective where they are sharded otherwise.

    Raises WeightsUnusable for state of a parameter that the model does not have, or of another shape.
    """
    parameters = dict(weights)
    strangers = sorted(set(state) - set(parameters))
    if strangers:
        raise WeightsUnusable(f"the optimiser state knows {strangers[0]}, which the model does not have")
    optimizer.state.clear()
    for name, values in state.items():
        parameter = parameters[name]
        restored: dict[str, Tensor] = {}
        for key, value in values.items():
            if value.dim() == 0:
                restored[key] = value.to(parameter.device, copy=True)
            elif value.shape == parameter.shape:
                found = like(value, parameter)
                restored[key] = found if isinstance(found, DTensor) else found.clone()
            else:
                raise WeightsUnusable(f"the optimiser's {key} of {name} has shape {tuple(value.shape)}")
        optimizer.state[parameter] = restored


def below(place: str, divided: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The same one step further from the root of a state, for `load_state`."""
    return {f"{place}{_BETWEEN}{path}": tensor for path, tensor in divided.items()}


def save_state(state: Mapping[str, Any], directory: Path, ranks: Ranks) -> None:
    """Writes a state's directory, flushed to the disk. A collective.

    Raises WeightsUnusable on every rank where one of them cannot write.
    """
    tensors: dict[str, Tensor] = {}
    plain = _without_tensors(state, (), tensors)
    writer = FileSystemWriter(directory)
    with _told(directory):
        save(tensors, storage_writer=writer, process_group=ranks.control, no_dist=ranks.size == 1)
    ranks.from_first(lambda: _write(directory / INDEX, json.dumps(plain)))


def load_state(directory: Path, ranks: Ranks, divided: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Reads a state. A tensor is sharded as the one that `divided` has for its path or for the one above, left out
    where that is None, and else whole, on the CPU. A collective.

    Raises WeightsUnusable.
    """
    reader = FileSystemReader(directory)
    try:
        state: dict[str, Any] = json.loads((directory / INDEX).read_text())
        stored = reader.read_metadata().state_dict_metadata
    except (OSError, ValueError, EOFError, AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise WeightsUnusable(f"{directory}: {error}") from error
    tensors: dict[str, Any] = {}
    for path, entry in stored.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise WeightsUnusable(f"{directory}: {path} is not a tensor")
        like_which = path if path in divided else path.rpartition(_BETWEEN)[0]
        if like_which not in divided or divided[like_which] is not None:
            tensors[path] = _room(entry, divided.get(like_which))
    with _told(directory):
        load(tensors, storage_reader=reader, process_group=ranks.control, no_dist=ranks.size == 1)
    for path, tensor in tensors.items():
        *above, last = path.split(_BETWEEN)
        place = state
        for key in above:
            place = place.setdefault(key, {})
        place[last] = tensor
    return state


def _without_tensors(tree: Mapping[str, Any], path: Sequence[str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The tree, whose tensors are put under their paths."""
    plain: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            plain[key] = _without_tensors(value, (*path, key), tensors)
        elif isinstance(value, Tensor):
            tensors[_BETWEEN.join((*path, key))] = value.detach()
        else:
            plain[key] = value
    return plain


def _room(entry: TensorStorageMetadata, reference: Tensor | None) -> Tensor:
    """A tensor to read into."""
    if isinstance(reference, DTensor) and reference.shape == entry.size:
        return torch.empty_like(reference.detach(), dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """What goes wrong at a rank, said of it on every rank."""
    with warnings.catch_warnings():
        # One process is told that it is one.
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        try:
            yield
        except CheckpointException as failed:
            rank, (error, _) = next(iter(failed.failures.items()))
            if not isinstance(error, Exception):  # a signal came meanwhile
                raise error from None
            raise WeightsUnusable(f"{directory}, at rank {rank}: {error}") from error


def _write(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
