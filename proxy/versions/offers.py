"""Check what a trainer offers to send to engines: there is no file to read yet, so names, shapes and the sender."""

from __future__ import annotations

import math
from collections.abc import Sequence
from urllib.parse import urlsplit

from proxy.contract.exchange import Offer
from proxy.contract.policy import WeightsReference
from proxy.errors import WeightsRejected
from proxy.outbound.addresses import Destinations, literal
from proxy.versions.safetensors import SIZES, TensorEntry
from proxy.versions.shapes import check_whole
from proxy.versions.weights import BaseModel

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_MOST_CHARACTERS = 512


class Senders:
    """The hosts from which engines may receive weights. The proxy and the engines connect to whatever host a trainer
    names, so that a trainer's key must not be enough to reach any place in the proxy's network."""

    def __init__(self, allow: Sequence[str]) -> None:
        self._allow = Destinations(allow)

    def check(self, url: str) -> None:
        """Raise WeightsRejected unless a URL is http://HOST:PORT of an allowed host."""
        try:
            parts = urlsplit(url)
            host, is_plain = parts.hostname or "", url == f"http://{parts.hostname}:{parts.port}"
        except ValueError:
            host, is_plain = "", False
        if not is_plain or len(url) > _MOST_CHARACTERS:
            raise WeightsRejected(
                "offer.url must be http://HOST:PORT, with the host in lower case", param="offer.url"
            )
        address = literal(host)
        is_allowed = self._allow.is_allowed_name(host) if address is None else self._allow.is_allowed(address)
        if not is_allowed:
            raise WeightsRejected(
                f"engines may not receive weights from {host}: add the trainer's host, or its network, to"
                " server.weights_senders",
                param="offer.url",
            )


def check_offer(weights: WeightsReference, offer: Offer, base: BaseModel | None) -> None:
    """Raise WeightsRejected unless the offered tensors are those of the base model, in the size that the version has.
    Without a base, only the size is compared."""
    tensors: dict[str, TensorEntry] = {}
    position = 0
    for sent in (sent for bucket in offer.buckets for sent in bucket):
        if sent.name in tensors:
            raise WeightsRejected(f"{sent.name} is offered twice")
        if sent.dtype not in _DTYPES or min(sent.shape, default=0) < 0:
            raise WeightsRejected(f"{sent.name} has a dtype or a shape that no engine here loads")
        kind = _DTYPES[sent.dtype]
        end = position + math.prod(sent.shape) * SIZES[kind]
        tensors[sent.name] = TensorEntry(kind, sent.shape, position, end)
        position = end
    if not tensors or position != weights.bytes:
        raise WeightsRejected(
            f"the offered tensors have {position} bytes, not {weights.bytes}", param="weights.bytes"
        )
    if base is not None:
        check_whole(tensors, base.tensors, base.config)
