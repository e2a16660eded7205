"""The processes that train together: one, or as many as torchrun started.

Only the first rank talks to the proxy and to the disk; `from_first` broadcasts its results to the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.errors import ConfigurationError
from trainer.parallel.layout import Layout

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

# The first rank waits for trajectories, or for a proxy that is down, without a bound; the others wait for it, and
# gloo's default of half an hour would end them.
_PATIENCE = timedelta(days=365)


class Ranks:
    """The place of this process among its peers. Build it with `join`, end it with `leave`.

    A batch is divided into `data_size` shares, and the ranks that divide a row among them work on one share.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        control: dist.ProcessGroup | None,
        layout: Layout | None = None,
        meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.layout = layout or Layout(data=size)
        self.data_rank = rank % self.layout.stage // self.layout.row
        self.data_size = size // self.layout.copy
        self._control = control
        self._meshes = {} if meshes is None else meshes

    def mesh(self, **sizes: int) -> DeviceMesh:
        """Return the ranks as a grid of named dimensions, the last one innermost. A collective at the first call.

        Meshes are cached because every process group has connections and threads of its own.
        """
        key = tuple(sizes.items())
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return self._meshes[key]

    def arranged(self, layout: Layout | None) -> Ranks:
        """Return the same processes in another layout. Raises ConfigurationError if it needs another number."""
        if layout is not None:
            layout.check_world(self.size)
        return Ranks(self.rank, self.size, self.device, self._control, layout, self._meshes)

    @property
    def control(self) -> dist.ProcessGroup | None:
        """The gloo group of all ranks, for objects and tensors on the CPU; None for a single rank."""
        return self._control

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, action: Callable[[], _Value]) -> _Value:
        """Run `action` on the first rank and return its result, or raise its exception, on every rank."""
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
        """Return the value of every share of the batch, in order, on the first rank; an empty list on the others."""
        if self.size == 1:
            return [value]
        values: list[_Value | None] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=0, group=self._control)
        return cast("list[_Value]", (values or [])[: self.layout.stage : self.layout.row])

    @property
    def leads_stage(self) -> bool:
        """Whether this is the first of the ranks that have the same place in the pipeline."""
        return self.rank % self.layout.stage == 0

    def join_stages(self, tensors: dict[_Key, Tensor]) -> dict[_Key, Tensor]:
        """Collect on the first rank the tensors of all ranks that lead a stage; return {} on the others.

        `tensors` are whole and on the CPU. A collective.
        """
        others = range(self.layout.stage, self.size, self.layout.stage)
        if self.rank in others:
            mine = [(key, tensor.shape, tensor.dtype) for key, tensor in tensors.items()]
            dist.send_object_list([mine], dst=0, group=self._control)
            for tensor in tensors.values():
                dist.send(tensor.contiguous(), dst=0, group=self._control)
        for leader in others if self.is_first else ():
            headers: list[Any] = [None]
            dist.recv_object_list(headers, src=leader, group=self._control)
            for key, shape, dtype in headers[0]:
                tensor = torch.empty(shape, dtype=dtype)
                dist.recv(tensor, src=leader, group=self._control)
                tensors.setdefault(key, tensor)
        return tensors if self.is_first else {}

    @property
    def stage(self) -> int:
        """The place of this rank in the pipeline."""
        return self.rank // self.layout.stage

    def of_stages(self, value: _Value) -> list[_Value]:
        """Return the value of every pipeline stage, in order, on every rank. Ranks of a stage have equal values. A
        collective."""
        if self.size == 1:
            return [value]
        values: list[_Value | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return cast("list[_Value]", values[:: self.layout.stage])

    def to_first(self, tensor: Tensor | None, described: Tensor, stage: int) -> Tensor | None:
        """Return, on the first rank, the tensor of the rank that leads a pipeline stage; None on the others.

        `tensor` is on the CPU, with the shape and dtype of `described`, and only the leader's counts. Only the leader
        and the first rank wait for each other.
        """
        leader = stage * self.layout.stage
        if leader == 0:
            return tensor if self.is_first else None
        if self.rank == leader and tensor is not None:
            dist.send(tensor.contiguous(), dst=0, group=self._control)
        if not self.is_first:
            return None
        received = torch.empty(described.shape, dtype=described.dtype)
        dist.recv(received, src=leader, group=self._control)
        return received

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def join(device: Literal["auto", "cpu", "cuda"], layout: Layout | None = None, *, offload: bool = False) -> Ranks:
    """Join the peers that torchrun's environment names; without that environment this process is alone.

    Without a layout each rank takes its own share of a batch. With `offload` models are sharded even on a single
    rank, and their shards may be on the CPU.

    Raises ConfigurationError if `cuda` is asked for and torch finds none, if this machine has fewer devices than
    processes, if `offload` has no GPU to take memory off, or if the layout needs another number of processes. Every
    rank raises alike, so that none waits for one that refused.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("trainer.device: torch finds no CUDA device; use auto or cpu")
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    if offload and kind == "cpu":
        raise ConfigurationError(
            "trainer.offload: without a CUDA device, weights and optimiser state are in CPU memory already; remove"
            " the setting"
        )
    if kind == "cuda" and (here := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > torch.cuda.device_count():
        raise ConfigurationError(
            f"trainer.nproc: {here} processes run on this machine, and torch finds {torch.cuda.device_count()} CUDA"
            " devices; start one process per device, or set trainer.device to cpu"
        )
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if layout is not None:
        layout.check_world(size)
    if kind == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    else:
        place = torch.device("cpu")
        torch.set_flush_denormal(True)  # arithmetic on denormal numbers is many times slower on a CPU
    backend = "cpu:gloo,cuda:nccl" if offload else "nccl" if kind == "cuda" else "gloo"
    if size == 1:
        if offload:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return Ranks(0, 1, place, None, layout)
    dist.init_process_group(backend)
    control = dist.new_group(backend="gloo", timeout=_PATIENCE)
    return Ranks(dist.get_rank(), size, place, control, layout)
