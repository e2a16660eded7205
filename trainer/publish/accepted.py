"""Whether the run's engine loads what this trainer publishes."""

from __future__ import annotations

from proxy.contract.policy import Head, WeightsFormat
from trainer.config import AdapterPublish, TrainerSettings
from trainer.errors import ConfigurationError


class Accepted:
    """Whole weights every engine loads, adapters some. The proxy is asked until the engine has told it, which may be
    starting together with the trainer."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.is_unknown = settings.adapter is not None and settings.adapter.publish is AdapterPublish.ADAPTER

    def look(self, head: Head) -> None:
        """Raises ConfigurationError where the engine would serve none of this trainer's versions."""
        if not self.is_unknown or head.formats is None:
            return
        if WeightsFormat.ADAPTER not in head.formats:
            raise ConfigurationError(
                "trainer.adapter.publish: the run's engine loads whole weights only, and would serve no version that"
                " is an adapter; set trainer.adapter.publish = merged"
            )
        self.is_unknown = False
