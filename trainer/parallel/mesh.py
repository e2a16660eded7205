"""The processes that train together: one, or as many as torchrun started.

Only the first rank talks to the proxy and to the disk; `from_first` gives the others what it got.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist

from trainer.errors import ConfigurationError

_Value = TypeVar("_Value")

# The first rank waits for trajectories, or for a proxy that is down, as long as it takes; the others wait for it.
_PATIENCE = timedelta(days=365)


class Ranks:
    """This process's place among its peers. Build it with `join`, end it with `leave`."""

    def __init__(self, rank: int, size: int, device: torch.device, control: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._control = control

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, action: Callable[[], _Value]) -> _Value:
        """Runs `action` on the first rank and returns its result, or raises its exception, on every rank."""
        if self.size == 1:
            return action()
        outcome: list[object] = [None, None]
        if self.is_first:
            try:
                outcome = [action(), None]
            except Exception as error:  # noqa: BLE001 - raised again below, on every rank
                outcome = [None, error]
        dist.broadcast_object_list(outcome, src=0, group=self._control)
        value, failure = outcome
        if isinstance(failure, Exception):
            raise failure
        return cast("_Value", value)

    def gather(self, value: _Value) -> list[_Value]:
        """Every rank's value in rank order, on the first rank; nothing on the others."""
        if self.size == 1:
            return [value]
        values: list[_Value | None] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=0, group=self._control)
        return cast("list[_Value]", values or [])

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def join(device: Literal["auto", "cpu", "cuda"]) -> Ranks:
    """Joins the peers that torchrun's environment names; alone without it.

    Raises ConfigurationError where `cuda` is asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "trainer.device: cuda was asked for, and torch finds no CUDA device; use auto or cpu"
        )
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if kind == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    else:
        place = torch.device("cpu")
        torch.set_flush_denormal(True)
    if size == 1:
        return Ranks(0, 1, place, None)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    control = dist.new_group(backend="gloo", timeout=_PATIENCE)
    return Ranks(dist.get_rank(), size, place, control)
