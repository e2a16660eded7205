"""Versions that engines receive from the trainer through process groups; the disk gets them after the commit.

Between the commit and the end of the writing, a version is on no disk, as with shared memory (`tensors.py`), and the
same rules hold: its claims are leased until it is saved, and the next version waits for that. An engine that asks
later reads the directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from proxy.contract.exchange import Offer
from proxy.contract.policy import Head, WeightsFormat, WeightsReference
from trainer.config import CollectiveWeights
from trainer.models.divided import DividedWeights, PublishedWeights, bytes_of, described
from trainer.models.policy import Policy
from trainer.parallel.mesh import Ranks
from trainer.publish.disk import DiskPublisher, new_name
from trainer.publish.listener import own_address
from trainer.publish.publisher import Staged, TrainerState
from trainer.publish.sending import Sender


class CollectivePublisher(DiskPublisher):
    """A publisher through process groups of torch.distributed with the trainer's first rank.

    Adapters go to the disk at once, merged ones too: they are merged while they are written.
    """

    def __init__(
        self,
        settings: CollectiveWeights,
        base: Path,
        policy: Policy | None = None,
        ranks: Ranks | None = None,
        *,
        proxy_url: str,
    ) -> None:
        """Raises ConfigurationError if the first rank cannot listen at the configured address."""
        super().__init__(settings, base, policy, ranks)
        self._sender: Sender | None = None
        if self._adapted is None and self._ranks.is_first:
            self._sender = Sender(settings.host or own_address(proxy_url), settings.port, settings.backend)

    def stage(
        self,
        head: Head,
        tensors: PublishedWeights,
        state: TrainerState | None,
        *,
        with_tensors: bool = True,
    ) -> Staged:
        if self._adapted is not None:
            return super().stage(head, tensors, state, with_tensors=with_tensors)
        uri, offer = self._ranks.from_first(lambda: self._offer(head, tensors))
        weights = WeightsReference(
            uri=uri,
            format=WeightsFormat.HUGGINGFACE,
            # No file exists that could have a checksum. The name is enough to know the version by until then.
            sha256=hashlib.sha256(uri.encode()).hexdigest(),
            bytes=bytes_of(tensors),
        )

        def save(engines: int) -> Staged:
            if isinstance(tensors, DividedWeights):
                self._send_gathered(tensors, engines)
            saving = partial(self._saving, head, tensors)
            return self._write_to(Path(uri), head, saving, state, with_tensors=with_tensors)

        return Staged(parent=head.weights, weights=weights, save=save, offer=offer)

    def settle(self, staged: Staged) -> None:
        super().settle(staged)
        self._withdraw()

    def discard(self, staged: Staged) -> None:
        super().discard(staged)
        self._withdraw()

    def close(self) -> None:
        super().close()
        if self._sender is not None:
            self._sender.close()

    def _offer(self, head: Head, tensors: PublishedWeights) -> tuple[str, Offer]:
        assert self._sender is not None
        uri = str(self._directory / head.run_id / new_name(head))
        source = None if isinstance(tensors, DividedWeights) else partial(_all_of, tensors)
        return uri, self._sender.offer(described(tensors), source)

    def _send_gathered(self, tensors: DividedWeights, engines: int) -> None:
        """Send the weights of a divided model to engines, each tensor while it is gathered, until as many as the
        proxy expects have them. A collective."""
        names = list(tensors.described)
        while self._ranks.from_first(lambda: self._sender is not None and self._sender.is_asked(engines)):
            gathered = tensors.stream(names)
            if self._sender is not None:
                self._sender.send(gathered)
            else:
                for _ in gathered:
                    pass

    def _withdraw(self) -> None:
        if self._sender is not None:
            self._sender.withdraw()


def _all_of(tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
    return tensors.values()
