"""Weights that a trainer sends to engines through a process group of torch.distributed, without a file.

A trainer offers a version when it commits it, and listens at `Offer.url` until the version is on its disk. For each
engine the proxy asks there for a group (`Join`, as MessagePack, answered by `Place`), has the engine join it, and has
it receive bucket after bucket. The trainer is rank 0 of each group, the engine's processes are the others. Each
tensor is a broadcast of its own, in the order of the buckets, as SGLang's `/update_weights_from_distributed` expects.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

JOIN_PATH = "/join"
"""The path of `Join` requests at `Offer.url`."""


class GroupBackend(StrEnum):
    """The library that moves the tensors: `gloo` over TCP, from and to any device; `nccl` between GPUs."""

    GLOO = "gloo"
    NCCL = "nccl"


class SentTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor by its Hugging Face name. `dtype` is torch's name of it, such as `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Buckets = tuple[tuple[SentTensor, ...], ...]
"""All tensors of a version in the order in which they are sent, grouped by the requests that receive them."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A version that its trainer sends to whoever has the `token`. `url` is http://HOST:PORT."""

    url: str
    token: str
    backend: GroupBackend
    buckets: Buckets


class Join(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for a process group with an engine of `ranks` processes."""

    token: str
    ranks: int = 1


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A group that the engine's processes join as ranks 1 to N by the store at `host` and `port`. The host is that of
    the offer."""

    host: str
    port: int
    group: str
