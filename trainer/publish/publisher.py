"""How a trained version reaches the engines, and how a trainer gets it back.

The order that every transport keeps: `stage` makes the weights reachable and durable, then the proxy's commit makes
them a version, then `settle` or `discard` says how that ended. What was staged and never committed is garbage, which
`collect` removes; what the proxy's head refers to is never garbage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from proxy.contract.policy import Head, WeightsReference
from trainer.models.policy import Policy

TrainerState = dict[str, Any]
"""Plain values and tensors: everything beside the weights that the next step depends on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """Weights that are reachable and not yet a version."""

    parent: WeightsReference | None
    weights: WeightsReference


class WeightPublisher(Protocol):
    def stage(self, head: Head, tensors: Mapping[str, Tensor], state: TrainerState | None) -> Staged:
        """Makes the successor of `head` reachable and durable. `state` None: there is none to go on from. A
        collective: the first rank has the weights, and each has its part of the state."""
        ...

    def settle(self, staged: Staged) -> None:
        """The commit was made."""
        ...

    def discard(self, staged: Staged) -> None:
        """The commit was refused: nobody will ever refer to it."""
        ...

    def collect(self, head: Head) -> list[str]:
        """Removes what earlier trainers of this run staged and never committed; returns what it removed."""
        ...

    def removable(self, head: Head) -> tuple[str, ...]:
        """The uris of versions that no trainer needs: committed ones without a trainer state, and not `head`."""
        ...

    def remove(self, uris: Sequence[str]) -> None:
        """Deletes versions that the proxy has marked as removed; those that are gone already are passed over."""
        ...

    def restore(
        self, head: Head, policy: Policy, divided: Mapping[str, Tensor | None] | None = None
    ) -> TrainerState | None:
        """Makes a policy the head's; returns its trainer state, None if that was not kept. Tensors of the state are
        sharded as what `divided` has for their place in it, else whole. A collective.

        Raises WeightsUnusable.
        """
        ...

    def close(self) -> None:
        """The trainer ends: what it staged and did not settle is nobody's any more."""
        ...
