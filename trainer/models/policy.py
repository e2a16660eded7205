"""The interface that a learner and a publisher use: a whole model, or an adapter over a frozen one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trainer.config import Packing
from trainer.models.passes import Loss, Rows, Scores


class Scorer(Protocol):
    """A model that scores tokens, such as a reference."""

    def score(self, rows: Sequence[Rows]) -> list[Scores]:
        """Score rows without a gradient (`Passes.score`)."""
        ...


class Policy(Scorer, Protocol):
    """Passes over micro-batches (`models/passes.py`), and weights that are trained, loaded and published."""

    @property
    def elsewhere(self) -> frozenset[str]: ...

    @property
    def packings(self) -> frozenset[Packing]:
        """The layouts of rows that the model computes correctly."""
        ...

    @property
    def vocabulary(self) -> int: ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trained parameters."""
        ...

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters under their names in a version's files; tied parameters once."""
        ...

    def load_base(self, directory: Path) -> None:
        """Load version 0: the base model in `directory`. Raises WeightsUnusable."""
        ...

    def load_version(self, directory: Path) -> None:
        """Load the version in `directory`. Raises WeightsUnusable."""
        ...

    def learn(self, rows: Sequence[Rows], loss: Loss) -> list[Scores]: ...

    def gradient_norm(self) -> float: ...

    def in_float32(self) -> AbstractContextManager[None]:
        """Compute passes inside the block in float32, whatever the configured precision."""
        ...

    def __call__(self, *inputs: Any) -> Any:
        """Return (log-probabilities, entropies) of the N targets of `Rows`, differentiable."""
        ...
