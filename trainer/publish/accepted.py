"""The check that a run takes the format of weights that this trainer publishes."""

from __future__ import annotations

from proxy.contract.policy import Head, WeightsFormat
from trainer.config import AdapterPublish, TrainerSettings
from trainer.errors import ConfigurationError


class Accepted:
    """The check that the run's engine loads adapters, which not every engine does. The engine may start together
    with the trainer, so the check is repeated until the proxy knows the engine's formats."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._publishes_adapters = self.is_unknown = (
            settings.adapter is not None and settings.adapter.publish is AdapterPublish.ADAPTER
        )

    def check(self, head: Head) -> None:
        """Raise ConfigurationError if the run accepts, or its engine could serve, none of this trainer's versions."""
        if head.weights_kind == "adapter" and not self._publishes_adapters:
            raise ConfigurationError(
                f'trainer.adapter: the run {head.run_name!r} has weights = "adapter" and takes adapters only; give'
                ' [trainer.adapter] with publish = "adapter"'
            )
        if not self.is_unknown or head.formats is None:
            return
        if WeightsFormat.ADAPTER not in head.formats:
            raise ConfigurationError(
                "trainer.adapter.publish: the run's engine loads whole weights only, and would serve no version that"
                " is an adapter; set trainer.adapter.publish = merged"
            )
        self.is_unknown = False
