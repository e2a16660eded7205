"""The verdict on a replayed step: whether the same weights came out, and what differs."""

from __future__ import annotations

from pathlib import Path

import msgspec
from torch import Tensor

from trainer.models.state_dict import read_weights


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A weight that differs: `elements` out of `of` elements do, by at most `largest`."""

    name: str
    elements: int
    of: int
    largest: float


class ConditionDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A condition of the machine that was `then` when the step was made and is `now`."""

    name: str
    then: str
    now: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of replaying the step of `version`.

    `replayed` are the versions whose steps were made again, in order; the last is `version`. `compared` tells whether
    the committed weights were available to be compared tensor by tensor. Loss and norm of a step without a gradient
    are None.
    """

    version: int
    identical: bool
    committed_sha256: str
    replayed_sha256: str
    replayed: tuple[int, ...]
    trajectories: int
    committed_loss: float | None
    replayed_loss: float | None
    committed_gradient_norm: float | None
    replayed_gradient_norm: float | None
    conditions: tuple[ConditionDifference, ...]
    compared: bool
    tensors: tuple[TensorDifference, ...]


def tensor_differences(tensors: dict[str, Tensor], committed: Path) -> list[TensorDifference]:
    """Return the tensors that differ from those in the directory `committed`."""
    found = []
    stored = read_weights(committed)
    for name, tensor in sorted(tensors.items()):
        if name not in stored or stored[name].shape != tensor.shape:
            found.append(
                TensorDifference(name=name, elements=tensor.numel(), of=tensor.numel(), largest=float("inf"))
            )
            continue
        changed = stored[name] != tensor
        if bool(changed.any()):
            largest = (stored[name] - tensor).abs().max().item()
            found.append(TensorDifference(name=name, elements=int(changed.sum()), of=tensor.numel(), largest=largest))
    return found
