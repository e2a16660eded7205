"""Prove that an engine computes with the weights that it was given."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from proxy.contract.policy import Probe
from proxy.engines.protocol import Engine, EngineInfo
from proxy.errors import InvalidRequest, WeightsRejected
from proxy.log import logger
from proxy.serving.records import Target
from proxy.versions.tensor_digests import TensorDigests, is_float32

# Mean difference in nats per token above which engine and trainer compute with different weights. Engines in bfloat16
# differ from the trainer's float32 by about 0.01. A smaller bound takes good engines out; an adapter that is not
# applied exceeds this one as soon as training changed anything.
TOLERANCE = 0.05
FLOAT32_TOLERANCE = 1e-4
"""The bound for an engine that has the numbers of the files as they are: rounding makes 0.00001."""

_SHOWN = 3
_LOG = logger(__name__)


class Failure(msgspec.Struct, frozen=True):
    """The proof failed for a `reason`. `is_version_at_fault`: the engine computed other versions rightly, or has no
    precision of its own that could explain it."""

    reason: str
    is_version_at_fault: bool


class WholeWeightsProof:
    """Proves the versions of whole weights that one engine is given, by the trainer's probe and the engine's own
    checksums.

    Engines name and arrange tensors in their own ways, so a checksum counts only if it was equal to that of a file
    at an earlier load.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._has_proven = False
        self._comparable: frozenset[str] | None = None
        """Names of the tensors whose checksums were equal to those of the files; None before the first load."""

    async def failure(self, target: Target, info: EngineInfo) -> Failure | None:
        """Return why the engine does not compute with the target; None if nothing speaks against it.

        Raises EngineUnavailable, EngineTimeout; EngineFailed if the engine breaks at the probe.
        """
        if (failure := await self._wrong_probe(target, info)) is not None:
            return failure
        # Of a version that the trainer has sent there are no files with which checksums could be compared.
        is_on_disk = target.weights is not None and target.before is None
        if is_on_disk and not target.is_adapter and info.is_float32:
            return await self._wrong_checksums(Path(target.path))
        return None

    async def _wrong_probe(self, target: Target, info: EngineInfo) -> Failure | None:
        if target.probe is None:  # from a trainer that computes none
            return None
        is_exact = await is_exact_in(target, info)
        try:
            scored = await self._engine.score(target.probe.ids)
        except InvalidRequest as error:
            _LOG.warning("engine scores no tokens", engine=self._engine.name, error=error.message)
            return None
        tolerance = FLOAT32_TOLERANCE if is_exact else TOLERANCE
        difference = mean_difference(target.probe.logprobs, scored)
        if difference <= tolerance:
            self._has_proven = True
            return None
        reason = (
            "the engine computes with other weights than the trainer: the log-probabilities of the version's probe"
            f" differ by {difference:.2g} nats per token, and {tolerance:g} is allowed"
        )
        return Failure(reason, is_exact or self._has_proven)

    async def _wrong_checksums(self, directory: Path) -> Failure | None:
        if self._comparable is not None and not self._comparable:
            return None  # the engine computes none, or others than those over the files' bytes
        sums = await self._engine.checksums()
        try:
            wrong, equal = await asyncio.to_thread(_compared, directory, sums)
        except (OSError, WeightsRejected) as error:
            _LOG.warning("checksums not compared", directory=str(directory), error=str(error))
            return None
        broken = sorted(wrong & (self._comparable or frozenset()))
        if broken:
            more = f" and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
            reason = f"the engine holds other tensors than the files: {', '.join(broken[:_SHOWN])}{more}"
            return Failure(reason, is_version_at_fault=True)
        self._comparable = equal if self._comparable is None else self._comparable | equal
        return None


async def is_exact_in(target: Target, info: EngineInfo) -> bool:
    """Return whether an engine computes with the trainer's own numbers: neither the files nor the engine round
    them."""
    if not info.is_float32:
        return False
    if target.before is not None and target.offer is not None:
        return all(tensor.dtype == "float32" for bucket in target.offer.buckets for tensor in bucket)
    try:
        return await asyncio.to_thread(is_float32, Path(target.path))
    except (OSError, WeightsRejected):
        return False


async def wrong_weights(engine: Engine, probe: Probe, adapter: str, *, is_exact: bool = False) -> str | None:
    """Return how the engine's log-probabilities of the probe differ from the trainer's; None if they agree.

    Raises what `Engine.score` raises.
    """
    tolerance = FLOAT32_TOLERANCE if is_exact else TOLERANCE
    difference = mean_difference(probe.logprobs, await engine.score(probe.ids, adapter=adapter))
    if difference <= tolerance:
        return None
    return (
        f"it computes with other weights than those of the adapter {adapter}: its log-probabilities of the version's"
        f" probe differ from the trainer's by {difference:.2g} nats per token, and {tolerance:g} is allowed. Check"
        " that it applies adapters by name, its precision and its quantisation"
    )


def mean_difference(expected: Sequence[float], scored: Sequence[float]) -> float:
    """Return the mean absolute difference; infinity for figures that cannot be compared."""
    if len(expected) != len(scored) or not expected:
        return math.inf
    mean = sum(abs(one - other) for one, other in zip(expected, scored, strict=True)) / len(expected)
    return mean if math.isfinite(mean) else math.inf


def _compared(directory: Path, sums: Mapping[str, str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the tensors whose checksums differ from the files', and of those where they are equal."""
    digests = TensorDigests(directory)
    expected = {name: digests.digest(name) for name in sums}
    known = {name for name, digest in expected.items() if digest is not None}
    equal = frozenset(name for name in known if expected[name] == sums[name])
    return frozenset(known) - equal, equal
