"""A trainer's state: the optimiser's tensors by parameter name, written to and read from the disk by all ranks.

A state is a tree of plain values and tensors, which may be sharded. Every rank writes its own part of the tensors,
and any number of ranks reads the state, whatever their number was when it was written. `state_files` has the format.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from trainer.errors import WeightsUnusable
from trainer.parallel.mesh import Ranks
from trainer.parallel.state_files import StateReader, StateWriter, described, read_index, refuse_pickles
from trainer.parallel.tensor import NamedWeights, like

OptimizerState = dict[str, dict[str, Tensor]]

_BETWEEN = "/"


def capture_optimizer(weights: NamedWeights, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return this rank's part of the optimiser state, by name of the parameter.

    Parameters that were never stepped are omitted. The tensors are not copied: the next step changes them.
    """
    states = ((name, optimizer.state.get(parameter)) for name, parameter in weights)
    return {name: dict(state) for name, state in states if state}


def restore_optimizer(
    weights: NamedWeights, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Replace the optimiser's state by a captured one; an empty one resets it.

    A collective if a tensor is sharded differently from its parameter. A tensor that is sharded alike is used without
    a copy. Raises WeightsUnusable for the state of an unknown parameter, or of another shape.
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
    """Return `divided`, for `load_state`, with its paths moved below `place`."""
    return {f"{place}{_BETWEEN}{path}": tensor for path, tensor in divided.items()}


def save_state(state: Mapping[str, Any], directory: Path, ranks: Ranks) -> None:
    """Write a state's directory and flush it to the disk. A collective.

    Raises WeightsUnusable on every rank if one of them cannot write.
    """
    tensors: dict[str, Tensor] = {}
    plain = _without_tensors(state, (), tensors)
    writer = StateWriter(directory, ranks.rank, plain)
    with _failures_of_all_ranks(directory):
        save(tensors, storage_writer=writer, process_group=ranks.control, no_dist=ranks.size == 1)


def load_state(directory: Path, ranks: Ranks, divided: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Read a state after checking its files. A collective.

    `divided` maps a path, or the path above it, to a tensor with the sharding to read it in, or to None to omit it.
    A tensor without an entry is read whole, on the CPU. Raises WeightsUnusable.
    """
    refuse_pickles(directory)
    index = read_index(directory)
    state: dict[str, Any] = index.plain
    tensors: dict[str, Any] = {}
    for path, stored in index.tensors.items():
        reference = path if path in divided else path.rpartition(_BETWEEN)[0]
        if reference not in divided or divided[reference] is not None:
            tensors[path] = _room(described(stored), divided.get(reference))
    reader = StateReader(directory, index, ranks.rank, ranks.size)
    with _failures_of_all_ranks(directory):
        load(tensors, storage_reader=reader, process_group=ranks.control, no_dist=ranks.size == 1)
    for path, tensor in tensors.items():
        *above, last = path.split(_BETWEEN)
        place = state
        for key in above:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise WeightsUnusable(f"{directory}: {path} is both a value and a group of tensors")
        place[last] = tensor
    return state


def plain_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state's plain values, with empty groups in place of groups of tensors."""
    return _without_tensors(state, (), {})


def copied(state: Mapping[str, Any], into: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return a state with copies of its tensors on the CPU, which later steps do not change.

    The memory of `into`, earlier copies that nobody reads any more, is used again: taking new memory from the system
    costs three times what the copying does.
    """
    made: dict[str, Any] = {}
    for key, value in state.items():
        before = into.get(key)
        if isinstance(value, Mapping):
            made[key] = copied(value, before if isinstance(before, Mapping) else {})
        elif not isinstance(value, Tensor):
            made[key] = value
        elif _fits(before, value):
            made[key] = before.copy_(value.detach())
        else:
            made[key] = value.detach().to("cpu", copy=True)
    return made


def _fits(copy: Any, value: Tensor) -> TypeGuard[Tensor]:
    return isinstance(copy, Tensor) and (copy.shape, copy.dtype) == (value.shape, value.dtype)


def _without_tensors(tree: Mapping[str, Any], path: Sequence[str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the tree without its tensors, and add these to `tensors` by path."""
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
    """Return an empty tensor to read a stored one into, sharded like `reference` if their shapes agree."""
    if isinstance(reference, DTensor) and reference.shape == entry.size:
        return torch.empty_like(reference.detach(), dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


@contextmanager
def _failures_of_all_ranks(directory: Path) -> Iterator[None]:
    """Turn the failure of any rank into WeightsUnusable on this one."""
    with warnings.catch_warnings():
        # torch warns that it assumes a single process, which is right.
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        try:
            yield
        except CheckpointException as failed:
            rank, (error, _) = next(iter(failed.failures.items()))
            if not isinstance(error, Exception):  # a signal arrived in the meantime
                raise error from None
            raise WeightsUnusable(f"{directory}, at rank {rank}: {error}") from error
