"""A trainer's side of a process group. `python -m tests.engines.weight_sender MODEL GROUP COUNT` is a trainer of its
own: it prints its port, sends the first COUNT tensors, prints a line, and then is silent."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file

from proxy.contract.exchange import Buckets, GroupBackend, Offer, Place, SentTensor
from proxy.process_groups import WeightGroup

HOST = "127.0.0.1"
PATIENCE = 60.0


def offer_of(tensors: Mapping[str, torch.Tensor], *, per_bucket: int = 1000) -> Offer:
    """Return the offer of these tensors in their order."""
    sent = [
        SentTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    buckets: Buckets = tuple(tuple(sent[at : at + per_bucket]) for at in range(0, len(sent), per_bucket))
    return Offer(url="http://127.0.0.1:9", token="token", backend=GroupBackend.GLOO, buckets=buckets)


class WeightSender:
    """Rank 0 of a new group with an engine of `ranks` processes."""

    def __init__(self, group: str | None = None, *, ranks: int = 1) -> None:
        self._size = 1 + ranks
        self._store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            HOST, 0, self._size, is_master=True, timeout=timedelta(seconds=PATIENCE), wait_for_workers=False
        )
        self.place = Place(host=HOST, port=self._store.port, group=group or f"group-{uuid.uuid4().hex}")
        self._group: WeightGroup | None = None

    def join(self) -> None:
        """Wait for the engine."""
        self._group = WeightGroup(
            self._store, group=self.place.group, rank=0, size=self._size, backend="gloo", seconds=PATIENCE
        )

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Wait for the engine, and send it the tensors."""
        self.join()
        self.broadcast(list(tensors.values()))

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors to an engine that has joined."""
        assert self._group is not None
        self._group.broadcast(tensors)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()

    @asynccontextmanager
    async def sending(self, tensors: Mapping[str, torch.Tensor]) -> AsyncIterator[Place]:
        """Send the tensors within this block. An engine that leaves the group early ends that."""
        task = asyncio.create_task(asyncio.to_thread(self.send, tensors))
        try:
            yield self.place
        finally:
            with contextlib.suppress(RuntimeError):
                await task
            self.close()


def main() -> None:
    model, group, count = sys.argv[1:]
    sender = WeightSender(group)
    sys.stdout.write(f"{sender.place.port}\n")
    sys.stdout.flush()
    tensors = load_file(Path(model) / "model.safetensors")
    sender.send(dict(list(tensors.items())[: int(count)]))
    sys.stdout.write("sent\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
