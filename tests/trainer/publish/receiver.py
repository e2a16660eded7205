"""An engine's end of a transfer: ask the trainer for a group, join it, and receive the tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from proxy.contract.exchange import Offer
from proxy.process_groups import WeightGroup
from proxy.serving.offers import join

_SECONDS = 30.0


class Receiver:
    """Joins at once. `tensors` yields each tensor of the offer when it has come."""

    def __init__(self, offer: Offer, ranks: int = 1) -> None:
        place = asyncio.run(join(offer, ranks))
        store = TCPStore(place.host, place.port, None, False, timedelta(seconds=_SECONDS), wait_for_workers=False)
        self._offer = offer
        self._group = WeightGroup(
            store, group=place.group, rank=1, size=1 + ranks, backend=offer.backend.value, seconds=_SECONDS
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for sent in (sent for bucket in self._offer.buckets for sent in bucket):
            tensor = torch.empty(sent.shape, dtype=getattr(torch, sent.dtype))
            self._group.broadcast([tensor])
            yield sent.name, tensor

    def close(self) -> None:
        self._group.close()


def receive(offer: Offer) -> dict[str, Tensor]:
    """Return all tensors of an offer."""
    receiver = Receiver(offer)
    try:
        return dict(receiver.tensors())
    finally:
        receiver.close()
