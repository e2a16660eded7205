"""The runs that one process trains, and where their settings come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.contract.policy import Head
from trainer.config import TrainerSettings


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`runs` are trained from the start, by the names of their sections. If `follows`, all active runs of the proxy
    of `process` are trained instead, as they come and go.

    `process` has the settings of the process. `settings` returns a run's settings as they are configured here, and
    `resolved` those together with the run's own settings at its proxy; both raise ConfigurationError.
    """

    runs: Mapping[str, TrainerSettings]
    process: TrainerSettings
    follows: bool
    settings: Callable[[str], TrainerSettings]
    resolved: Callable[[str, Head], TrainerSettings]

    @property
    def takes_turns(self) -> bool:
        """Whether several runs may be trained."""
        return self.follows or len(self.runs) > 1
