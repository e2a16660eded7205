"""A trainer that offers versions to engines, and writes their directories after the commit."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from proxy.claims.service import ClaimService
from proxy.contract.claim import ClaimRequest, CommitRequest
from proxy.contract.exchange import GroupBackend, Offer, SentTensor
from proxy.contract.identifiers import ClaimId
from proxy.contract.policy import STATE_INDEX, WeightsFormat, WeightsReference
from proxy.versions.inspector import WeightsInspector
from proxy.versions.saving import UnsavedVersions
from proxy.versions.service import VersionService
from tests.proxy.turns.world import World
from tests.proxy.versions.publishing import commit_request, random_numbers, reference

Tensors = Mapping[str, np.ndarray[Any, Any]]
SENDERS = ("127.0.0.0/8",)


def new_tensors() -> Tensors:
    return {"weight": 1 + 0.1 * random_numbers(4), "bias": 1 + 0.1 * random_numbers(3, 2)}


def offer_of(tensors: Tensors, url: str = "http://127.0.0.1:9") -> Offer:
    sent = tuple(SentTensor(name, str(tensor.dtype), tensor.shape) for name, tensor in tensors.items())
    return Offer(url=url, token="secret", backend=GroupBackend.GLOO, buckets=(sent[:1], sent[1:]))


class Offering:
    """The services of a proxy that sees the trainer's disk, and the trainer's requests."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.disk = directory / "weights"
        self.inspector = WeightsInspector(self.disk, senders=SENDERS)
        services = {"database": world.database, "clock": world.clock, "signals": world.signals}
        self.versions = VersionService(**services, inspector=self.inspector)  # type: ignore[arg-type]
        self.unsaved = UnsavedVersions(**services, inspector=self.inspector)  # type: ignore[arg-type]
        self.claims = ClaimService(**services)  # type: ignore[arg-type]

    async def claim(self) -> ClaimId:
        await self.world.ready()
        batch = await self.claims.claim(self.world.run, ClaimRequest(trainer="t", want=1, max_staleness=100))
        assert batch.claim_id is not None
        return batch.claim_id

    async def request(self, tensors: Tensors, url: str = "http://127.0.0.1:9") -> CommitRequest:
        weights = WeightsReference(
            uri=str(self.disk / "run_x" / f"v-{secrets.token_hex(4)}"),
            format=WeightsFormat.HUGGINGFACE,
            sha256=secrets.token_hex(32),
            bytes=sum(tensor.nbytes for tensor in tensors.values()),
        )
        head = await self.versions.head(self.world.run)
        request = commit_request([await self.claim()], head.version, weights)
        return msgspec.structs.replace(request, is_saved=False, offer=offer_of(tensors, url))

    async def commit(self, tensors: Tensors, url: str = "http://127.0.0.1:9") -> WeightsReference:
        request = await self.request(tensors, url)
        await self.versions.commit(self.world.run, request)
        return request.weights

    def write(self, weights: WeightsReference, tensors: Tensors) -> WeightsReference:
        """Write a version's directory, with a trainer state, and return its reference with all checksums."""
        directory = Path(weights.uri)
        directory.mkdir(parents=True)
        save_file(dict(tensors), directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps({}))
        found = reference(directory)
        state = directory / STATE_INDEX
        state.parent.mkdir()
        state.write_text("{}")
        return msgspec.structs.replace(found, files={**found.files, STATE_INDEX: "a" * 64})

    async def head(self) -> tuple[int, bool]:
        head = await self.versions.head(self.world.run)
        return head.version, head.is_saved
