"""Measurements that accompany the loop: phases, use of engine and GPUs, profiles; and the sinks that receive
metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

from proxy.contract.claim import EngineReading
from proxy.contract.policy import Head
from trainer.algorithm.parts import Algorithm, as_json
from trainer.batching.packing import MiniBatch
from trainer.config import TrainerSettings
from trainer.observe.clock import PhaseClock
from trainer.observe.metrics.sink import RunAbout
from trainer.observe.metrics.sinks import Sinks, open_sinks
from trainer.observe.tracing import Profiler, StepTrace
from trainer.observe.utilisation import EngineIdle, ModelFlops, peak_flops
from trainer.parallel.mesh import Ranks

_LOGGED = ("reward_mean", "staleness_mean", "tokens", "gradient_norm", "entropy", "logprob_gap_mean")

_log = structlog.get_logger("trainer")


class Instruments:
    """The instruments of one run. `base` is the base model's directory. `close` them at the end.

    A fault in any of them is logged; it neither blocks the loop nor ends it.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        algorithm: Algorithm,
        ranks: Ranks,
        base: Path,
        head: Head,
        profiler: Profiler,
    ) -> None:
        self.clock = PhaseClock()
        self._algorithm = algorithm
        self._ranks = ranks
        self._trace = StepTrace(settings.profile, head.run_id, ranks.rank, profiler)
        self._version = head.version
        self._engine = EngineIdle()
        self._flops, self._peak = _arithmetic(settings, algorithm, ranks, base)
        self._sinks: Sinks | None = None
        if ranks.is_first and settings.metrics.sinks:
            self._sinks = open_sinks(settings.metrics, _about(settings, algorithm, head))

    def between_steps(self, version: int) -> None:
        """Record that no phase is under way and that `version` is the head."""
        self.clock.end()
        self._version = version
        self._trace.between_steps(version)

    def utilisation(
        self, mini_batches: Sequence[MiniBatch], seconds: Mapping[str, float], engine: EngineReading | None
    ) -> dict[str, float]:
        """Return how well a step used engine and GPUs; figures that are not known are left out. `seconds` are those
        of its phases."""
        metrics = {}
        idle = self._engine.ratio(engine)
        if idle is not None:
            metrics["engine_idle_ratio"] = idle
        if self._flops is not None and self._peak is not None:
            flops = self._flops.of_step(mini_batches, self._algorithm)
            metrics["mfu"] = flops / (seconds["update"] * self._peak * self._ranks.size)
        return metrics

    def made(self, version: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of the committed `version` and send them to the sinks."""
        self._version = version
        if not self._ranks.is_first:
            return
        figures = {name: round(metrics[name], 4) for name in _LOGGED if name in metrics}
        seconds = {
            f"{name.removeprefix('seconds_')}_s": round(value, 3)
            for name, value in metrics.items()
            if name.startswith("seconds_")
        }
        _log.info("step", version=version, **figures, **seconds)
        if self._sinks is not None:
            self._sinks.put(version, metrics)

    def take_up(self) -> None:
        """Begin a turn of this run, if the process trains several."""
        self._trace.take_up()

    def set_aside(self) -> None:
        """End a turn of this run: other runs are trained from now on."""
        self.clock.end()
        self._trace.set_aside()

    def finish(self) -> None:
        """Tell the sinks that no more metrics follow. They write the rest while others are closed."""
        if self._sinks is not None:
            self._sinks.finish()

    def close(self) -> None:
        self.clock.end()
        self._trace.close(self._version)
        if self._sinks is not None:
            self._sinks.close()


def _arithmetic(
    settings: TrainerSettings, algorithm: Algorithm, ranks: Ranks, base: Path
) -> tuple[ModelFlops | None, float | None]:
    """Return the operations of the model and the peak of the device. None on a CPU, which has no useful peak, and
    with a critic, whose operations are not counted."""
    if ranks.device.type != "cuda" or algorithm.has_critic:
        return None, None
    name = torch.cuda.get_device_name(ranks.device)
    flops, peak = ModelFlops.of(base), peak_flops(name, settings.precision)
    if flops is None or peak is None:
        unknown = "the model's sizes" if flops is None else f"the peak of {name}"
        _log.info("the model's use of the GPU (mfu) is not told", unknown=unknown)
    return flops, peak


def _about(settings: TrainerSettings, algorithm: Algorithm, head: Head) -> RunAbout:
    config: dict[str, Any] = {
        "run": settings.run,
        "base_model": head.base_model,
        **settings.mathematics(),
        "algorithm": {"preset": settings.algorithm.preset, **as_json(algorithm)},
    }
    return RunAbout(id=head.run_id, name=head.run_name, next_version=head.version + 1, config=config)
