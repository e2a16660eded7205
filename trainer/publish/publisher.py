"""The way of a trained version to the engines, and back to a trainer.

Every transport keeps this order: `stage` makes the weights reachable and durable, the proxy's commit makes them a
version, and `settle` or `discard` follows by the result. Weights that were staged and never committed are garbage,
which `collect` removes; weights that the proxy's head refers to are never garbage.

A transport through memory or process groups makes them durable after the commit: `Staged.save` comes before `settle`,
and the version consumes its claims when the proxy has been told of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from proxy.contract.exchange import Offer
from proxy.contract.policy import Head, WeightsReference
from trainer.models.divided import PublishedWeights
from trainer.models.policy import Policy

TrainerState = dict[str, Any]
"""Plain values and tensors: everything that the next step depends on besides the published weights."""
OLDER_TENSORS = "older_tensors"
"""The key that a restored state has if its tensors are those of a version before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """Weights that engines can reach and that are no version yet.

    `save` makes them durable, and returns them with the checksums of all their files; None if they are durable
    already. Its argument is the number of engines that the proxy expects to ask for them before. A collective; raises
    WeightsUnusable. `offer` is how engines that read no files get the weights until then.
    """

    parent: WeightsReference | None
    weights: WeightsReference
    save: Callable[[int], Staged] | None = None
    offer: Offer | None = None


class WeightPublisher(Protocol):
    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which whole weights are published; None for an adapter, which is published as it is."""
        ...

    @property
    def keeps_weights(self) -> bool:
        """Whether staged weights are still read after `settle`. If not, their memory may be used again."""
        ...

    def is_state_due(self, head: Head) -> bool:
        """Return whether the successor of `head` is published with the tensors of its trainer state, or with the
        plain values only."""
        ...

    def stage(
        self,
        head: Head,
        tensors: PublishedWeights,
        state: TrainerState | None,
        *,
        with_tensors: bool = True,
    ) -> Staged:
        """Make the successor of `head` reachable, and durable or ready to be saved.

        Without a `state`, a trainer goes on from it with a fresh optimiser; without the state's tensors
        (`is_state_due`), with those of a version before. A collective: the first rank has the weights, or all ranks
        together, and each rank has its part of the state.
        """
        ...

    def settle(self, staged: Staged) -> None:
        """Record that the weights were committed."""
        ...

    def discard(self, staged: Staged) -> None:
        """Remove weights whose commit was refused."""
        ...

    def collect(self, head: Head) -> list[str]:
        """Remove weights that earlier trainers of this run staged and never committed. Return their names."""
        ...

    def removable(self, head: Head) -> tuple[str, ...]:
        """Return the URIs of versions that nobody needs to train or to make others from: committed ones without a
        trainer state that no other version is a difference to, except `head`."""
        ...

    def remove(self, uris: Sequence[str]) -> None:
        """Delete versions that the proxy has marked as removed, and ignore those that are gone already."""
        ...

    def restore(
        self, head: Head, policy: Policy, divided: Mapping[str, Tensor | None] | None = None
    ) -> TrainerState | None:
        """Load the head into a policy and return its trainer state; None if none was kept. A tensor of the state is
        sharded like the tensor at its place in `divided`, or else whole. A state whose tensors are older than its
        plain values has the key OLDER_TENSORS. A collective.

        Raises WeightsUnusable.
        """
        ...

    def close(self) -> None:
        """Release weights that were staged and not settled, at the end of the trainer."""
        ...
