"""A version that is being published, at once or behind the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from proxy.contract.policy import Head
from trainer.config import TrainerSettings
from trainer.errors import ConfigurationError
from trainer.parallel.mesh import Ranks
from trainer.publish.behind import Behind

Committed = Callable[[int, Mapping[str, float]], None]
"""Called with the number and the metrics of a version that has been committed."""


def ignored(version: int, metrics: Mapping[str, float]) -> None:
    """Do nothing about a committed version."""


class Pending:
    """A version whose commit is not known yet. `publish` writes and commits it and returns the resulting head:
    `behind` on a thread, or when `finish` is called. `committed` is called with its number by `finish`, on the thread
    of the caller."""

    def __init__(
        self, version: int, committed: Callable[[int], None], publish: Callable[[], Head], *, behind: bool
    ) -> None:
        self.version = version
        self.is_behind = behind
        self._committed = committed
        self._publish = publish
        self._behind = Behind(publish, "publish") if behind else None

    @property
    def is_done(self) -> bool:
        """Return whether `finish` would not wait."""
        return self._behind is not None and self._behind.is_done

    def finish(self, timeout: float | None = None) -> Head:
        """Return the resulting head. Raises the errors of publishing, and TimeoutError after `timeout` seconds."""
        made = self._publish() if self._behind is None else self._behind.result(timeout)
        self._committed(made.version)
        return made


def may_be_behind(settings: TrainerSettings, ranks: Ranks) -> bool:
    """Return whether versions are published behind the next step. Raises ConfigurationError."""
    wanted, allowed = settings.weights.behind, ranks.size == 1 and settings.batch.max_staleness > 0
    if wanted and ranks.size > 1:
        # A thread's collectives would interleave with those of the step.
        raise ConfigurationError(
            f"trainer.weights.behind: {ranks.size} processes train together, and only a single one publishes behind"
            " the next step; remove the setting"
        )
    if wanted and not allowed:
        raise ConfigurationError(
            "trainer.weights.behind: with batch.max_staleness = 0 the next batch must be sampled from the new"
            " version, so there is nothing to compute meanwhile; remove one of the two settings"
        )
    return allowed if wanted is None else wanted
