"""Reading a published version back: weights into a policy, and the trainer state."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from proxy.contract.delta import DELTA_INDEX, DeltaIndex, DeltaUnusable, LocalWeights, is_delta
from proxy.contract.policy import STATE_DIRECTORY, Head, WeightsReference
from trainer.errors import WeightsUnusable
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
    with _whole(head.weights, directory) as whole:
        policy.load_version(whole)
    if state is None:
        return None
    known = policy.elsewhere | {name for name, _ in policy.named_weights()}
    return state if set(state.get("optimizer", ())) <= known else None


@contextmanager
def _whole(weights: WeightsReference, directory: Path) -> Iterator[Path]:
    """Provide a verified version's whole files while the block runs. Raises WeightsUnusable."""
    if not is_delta(weights):
        yield directory
        return

    def beside(reference: WeightsReference) -> Path:
        at = Path(reference.uri)
        if at.parent != directory.parent or not at.is_dir():
            raise DeltaUnusable(f"{at}, which a version is a difference to, is missing")
        return at

    with tempfile.TemporaryDirectory(prefix=".whole-", dir=directory.parent) as made:
        try:
            at = LocalWeights(Path(made), 0, beside).materialise(weights)[1]
        except (DeltaUnusable, OSError) as error:
            raise WeightsUnusable(f"{directory}: {error}") from error
        yield at


def base_of(directory: Path) -> str | None:
    """Return the directory of the version that a version is stored as a difference to; None for a whole version.

    Raises WeightsUnusable."""
    path = directory / DELTA_INDEX
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeltaIndex).base.uri
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsUnusable(f"{path} cannot be read: {error}") from error


def has_weights(weights: WeightsReference) -> bool:
    """Return whether a version's files exist."""
    directory = Path(weights.uri)
    return (directory / DELTA_INDEX).is_file() or any(directory.glob("*.safetensors"))


def has_state(weights: WeightsReference) -> bool:
    """Return whether a version's trainer state exists in a format that can be read."""
    state = Path(weights.uri) / STATE_DIRECTORY
    return (state / INDEX).is_file() and not holds_pickles(state)


def alone() -> Ranks:
    """Return the ranks of a single process on the CPU."""
    return Ranks(0, 1, torch.device("cpu"), None)
