"""What a learner and a publisher need of a policy: a whole model, or an adapter over one that stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trainer.config import Packing
from trainer.models.passes import Loss, Rows, Scores


class Scorer(Protocol):
    """What a policy may be held to."""

    def score(self, rows: Sequence[Rows]) -> list[Scores]:
        """As `Passes.score`."""
        ...


class Policy(Scorer, Protocol):
    """Passes over micro-batches (`models/passes.py`), and weights that come and go."""

    @property
    def elsewhere(self) -> frozenset[str]: ...

    @property
    def packings(self) -> frozenset[Packing]:
        """The layouts of rows that it computes rightly."""
        ...

    @property
    def vocabulary(self) -> int: ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained."""
        ...

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained, under the names that it has in a version's files; tied parameters once."""
        ...

    def load_base(self, directory: Path) -> None:
        """Makes it version 0, of the base model in `directory`. Raises WeightsUnusable."""
        ...

    def load_version(self, directory: Path) -> None:
        """Makes it the version in `directory`. Raises WeightsUnusable."""
        ...

    def learn(self, rows: Sequence[Rows], loss: Loss) -> list[Scores]: ...

    def gradient_norm(self) -> float: ...

    def __call__(self, *inputs: Any) -> Any:
        """(log-probabilities, entropies) of the N targets of `Rows`, with their gradient."""
        ...
