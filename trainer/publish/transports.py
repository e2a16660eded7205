"""The choice of a transport by its settings."""

from __future__ import annotations

from pathlib import Path

from proxy.contract.policy import WeightsReference
from trainer.config import CollectiveWeights, DeltaWeights, SharedDirectory, TensorsWeights, TrainerSettings
from trainer.models.policy import Policy
from trainer.parallel.mesh import Ranks
from trainer.publish.collective import CollectivePublisher
from trainer.publish.delta import DeltaPublisher
from trainer.publish.disk import DiskPublisher
from trainer.publish.publisher import WeightPublisher
from trainer.publish.restoring import alone
from trainer.publish.stored import Mirror, StoredPublisher
from trainer.publish.tensors import TensorsPublisher


def fetch_version(settings: SharedDirectory, weights: WeightsReference | None) -> None:
    """Fetch a version's directory from the object store, if there is one. Raises ConfigurationError and
    WeightsUnusable."""
    if settings.url is not None:
        Mirror(settings.url, settings.directory).fetch(weights)


def publisher_of(
    settings: SharedDirectory,
    base: Path,
    policy: Policy | None = None,
    ranks: Ranks | None = None,
    *,
    proxy_url: str = TrainerSettings.model_fields["proxy_url"].default,
) -> WeightPublisher:
    """Return the publisher that the settings configure. Raises ConfigurationError."""
    if isinstance(settings, TensorsWeights):
        return TensorsPublisher(settings, base, policy, ranks)
    if isinstance(settings, CollectiveWeights):
        return CollectivePublisher(settings, base, policy, ranks, proxy_url=proxy_url)
    kind = DeltaPublisher if isinstance(settings, DeltaWeights) else DiskPublisher
    publisher = kind(settings, base, policy, ranks)  # type: ignore[arg-type]
    if settings.url is None:
        return publisher
    return StoredPublisher(publisher, Mirror(settings.url, settings.directory), settings, ranks or alone())
