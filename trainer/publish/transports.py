"""The choice of a transport by its settings."""

from __future__ import annotations

from pathlib import Path

from trainer.config import DeltaWeights, SharedDirectory
from trainer.models.policy import Policy
from trainer.parallel.mesh import Ranks
from trainer.publish.delta import DeltaPublisher
from trainer.publish.disk import DiskPublisher


def publisher_of(
    settings: SharedDirectory, base: Path, policy: Policy | None = None, ranks: Ranks | None = None
) -> DiskPublisher:
    """Return the publisher that the settings configure."""
    if isinstance(settings, DeltaWeights):
        return DeltaPublisher(settings, base, policy, ranks)
    return DiskPublisher(settings, base, policy, ranks)
