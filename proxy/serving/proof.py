"""Prove that an engine computes with the weights that it was given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from proxy.contract.policy import Probe
from proxy.engines.protocol import Engine

# Mean difference in nats per token above which engine and trainer compute with different weights. Engines in bfloat16
# differ from the trainer's float32 by about 0.01, embedded engines in float32 by less than 0.0001. A smaller bound
# takes good engines out; an adapter that is not applied exceeds this one as soon as training changed anything.
TOLERANCE = 0.05


async def wrong_weights(engine: Engine, probe: Probe, adapter: str) -> str | None:
    """Return how the engine's log-probabilities of the probe differ from the trainer's; None if they agree.

    Raises what `Engine.score` raises.
    """
    difference = _mean_difference(probe.logprobs, await engine.score(probe.ids, adapter=adapter))
    if difference <= TOLERANCE:
        return None
    return (
        f"it computes with other weights than those of the adapter {adapter}: its log-probabilities of the version's"
        f" probe differ from the trainer's by {difference:.2g} nats per token, and {TOLERANCE:g} is allowed. Check"
        " that it applies adapters by name, its precision and its quantisation"
    )


def _mean_difference(expected: Sequence[float], scored: Sequence[float]) -> float:
    """Return the mean absolute difference; infinity for figures that cannot be compared."""
    if len(expected) != len(scored) or not expected:
        return math.inf
    mean = sum(abs(one - other) for one, other in zip(expected, scored, strict=True)) / len(expected)
    return mean if math.isfinite(mean) else math.inf
