"""Reading a published version back: weights into a policy, and the trainer state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from proxy.contract.policy import STATE_DIRECTORY, Head, WeightsReference
from trainer.models.policy import Policy
from trainer.parallel.mesh import Ranks
from trainer.parallel.state_files import INDEX, holds_pickles
from trainer.publish.checksums import verify_version
from trainer.publish.publisher import TrainerState
from trainer.publish.states import read_state


def restore_version(
    head: Head,
    base: Path,
    policy: Policy,
    ranks: Ranks | None = None,
    divided: Mapping[str, Tensor | None] | None = None,
    root: Path | None = None,
) -> TrainerState | None:
    """Load a version into a policy and return its trainer state, sharded as `load_state` says. A collective.

    Return None for version 0, for a version whose state was deleted, and for a state of other weights than the policy
    trains: that of an adapter, if the whole model is trained now. Raises WeightsUnusable, also for a version outside
    `root`.
    """
    if head.weights is None:
        policy.load_base(base)
        return None
    directory = verify_version(head, root)
    # A version 0 with weights is another run's version: its optimiser and running means belong to that run's task.
    state = read_state(head, directory, ranks or alone(), divided or {}) if head.version > 0 else None
    policy.load_version(directory)
    if state is None:
        return None
    known = policy.elsewhere | {name for name, _ in policy.named_weights()}
    return state if set(state.get("optimizer", ())) <= known else None


def has_weights(weights: WeightsReference) -> bool:
    """Return whether a version's files exist."""
    return any(Path(weights.uri).glob("*.safetensors"))


def has_state(weights: WeightsReference) -> bool:
    """Return whether a version's trainer state exists in a format that can be read."""
    state = Path(weights.uri) / STATE_DIRECTORY
    return (state / INDEX).is_file() and not holds_pickles(state)


def alone() -> Ranks:
    """Return the ranks of a single process on the CPU."""
    return Ranks(0, 1, torch.device("cpu"), None)
