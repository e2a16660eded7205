"""A reference that follows the policy: reset to it every so many steps, or its exponential moving average.

Its weights are part of the trainer's state, beside the optimiser's. So a restarted trainer continues with the same
reference, even if old versions have been removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
import torch
from torch import Tensor

from trainer.config import ReferenceSettings
from trainer.errors import WeightsUnusable
from trainer.models.passes import Rows, Scores
from trainer.models.policy import Policy
from trainer.parallel.tensor import like, local_part

_log = structlog.get_logger("trainer")


class FollowingReference:
    """A second set of the policy's trained weights, float32 and divided among the ranks like them.

    It has no model of its own: to score, its weights replace the policy's during the pass. That works for whole
    models and adapters alike, and costs one copy of the trained weights. No pass of the policy may be between
    forward and backward meanwhile.
    """

    def __init__(self, policy: Policy, settings: ReferenceSettings) -> None:
        self._policy = policy
        self._settings = settings
        self._weights: dict[str, Tensor] = {}
        self.reset()

    def score(self, rows: Sequence[Rows]) -> list[Scores]:
        """Score rows under the reference's weights (`Passes.score`). A collective."""
        with self._in_place_of_the_policy():
            return self._policy.score(rows)

    def reset(self) -> None:
        """Make the reference equal to the policy."""
        self._weights = {name: weight.detach().clone() for name, weight in self._policy.named_weights()}

    def follow(self, steps: int) -> None:
        """Move the reference after an optimiser step of the policy, the `steps`-th since version 0."""
        if self._settings.ema is not None:
            with torch.no_grad():
                for mine, theirs in self._pairs():
                    mine.lerp_(theirs, 1 - self._settings.ema)
        if self._settings.reset_every is not None and steps % self._settings.reset_every == 0:
            self.reset()
            _log.info("the reference is the policy as it is now", optimizer_steps=steps)

    def capture(self) -> dict[str, Any]:
        """Return this rank's part of the weights, without copies."""
        return dict(self._weights)

    def restore(self, state: Mapping[str, Tensor] | None) -> None:
        """Take over captured weights. Without any, the reference is the policy as it was loaded: the base model, or
        the head if a following reference was configured after the run had begun.

        Raises WeightsUnusable if a weight is missing or has another shape.
        """
        self.reset()
        if state is None:
            return
        for name, mine in self._weights.items():
            stored = state.get(name)
            if stored is None or stored.shape != mine.shape:
                raise WeightsUnusable(
                    f"the reference of the trainer state has no {name} of shape {tuple(mine.shape)}"
                )
            with torch.no_grad():
                mine.copy_(like(stored, mine))

    @contextmanager
    def _in_place_of_the_policy(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mine, theirs in self._pairs():
            spare = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(spare)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of each weight: (reference, policy)."""
        for name, weight in self._policy.named_weights():
            yield local_part(self._weights[name]), local_part(weight.detach())
