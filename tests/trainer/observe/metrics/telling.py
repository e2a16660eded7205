"""A run whose steps are sent to a sink."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.observe.metrics.sink import RunAbout, Sink, StepMetrics


def about(next_version: int) -> RunAbout:
    config = {
        "run": "policy",
        "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.95]},
        "algorithm": {"clip": None},
    }
    return RunAbout(id="run_01jd0000000000000000000000", name="policy", next_version=next_version, config=config)


def metrics(version: int, add: float = 0.0) -> dict[str, float]:
    return {"reward_mean": version / 10 + add, "tokens": 100.0 * version, "staleness_share_0": 1.0}


def tell(sink: Sink, versions: Sequence[int], *, add: float = 0.0) -> None:
    """Send steps to a sink as one trainer does between its start and its end."""
    sink.open(about(versions[0]))
    for version in versions:
        sink.write(StepMetrics(version, 1_700_000_000.0 + version, metrics(version, add)))
    sink.close()
