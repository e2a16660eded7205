"""Process groups of torch.distributed beside the default one, as SGLang makes them for weights from a trainer.

torch has no public function for a group that does not begin with the default one. The classes of the backends are
public, and SGLang's keys in the store are repeated here: its group's name as a prefix, torch's own prefix of that
name, and the first device for which the backend is registered.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as dist


class WeightGroup:
    """A group of `size` processes in which rank 0 sends tensors to the others.

    Making one waits until all ranks are there, for `seconds` at most, as does each broadcast for the other side.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        group: str,
        rank: int,
        size: int,
        backend: str,
        seconds: float,
        host: str | None = None,
    ) -> None:
        """`host` is the address of this process for the other ranks, with gloo; None: that of the machine's name.

        Raises RuntimeError if a rank does not come, or the backend is not built in.
        """
        patience = timedelta(seconds=seconds)
        inner = dist.PrefixStore(f"{group}/", dist.PrefixStore(group, store))
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        # torch makes one member for all devices of such a backend, under the first one's key.
        of_device = dist.PrefixStore(f"{self._device.type}/", inner)
        self._member: Any = _member(of_device, rank, size, backend, patience, host)
        self._store = store  # whose server lives as long as the group

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send the tensors, or on other ranks than 0 fill them, one broadcast each. Raises RuntimeError if another
        rank dies or is silent, or the group is closed."""
        member = self._member
        if member is None:
            raise RuntimeError("the group is closed")
        for tensor in tensors:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            moved = tensor.to(self._device)
            member.broadcast([moved], options).wait()
            if moved is not tensor:
                tensor.copy_(moved)

    def close(self) -> None:
        """Leave the group. Other ranks that wait in a broadcast then fail at once."""
        member, self._member = self._member, None
        if member is not None:
            member.abort()


def host_store(host: str, seconds: float) -> TCPStore:
    """Return a store by which the ranks of a group find each other, with its server at `host` and a free port.

    Raises OSError if the address is not this machine's.
    """
    # Bound here, because torch's own server listens on all of the machine's addresses.
    with socket.create_server((host, 0)) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def _member(store: dist.Store, rank: int, size: int, backend: str, patience: timedelta, host: str | None) -> Any:
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = patience
        return dist.ProcessGroupNCCL(store, rank, size, options)
    if host is None:
        return dist.ProcessGroupGloo(store, rank, size, patience)
    gloo: Any = dist.ProcessGroupGloo  # torch's types lack the options
    chosen = gloo._Options()
    chosen._devices = [gloo.create_device(hostname=host)]
    chosen._timeout = patience
    return gloo(store, rank, size, chosen)
