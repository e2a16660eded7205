"""Functions that the processes of a gang run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.models.archon.steps import batch_of, two_updates
from trainer.config import TrainerSettings
from trainer.errors import ConfigurationError
from trainer.loading import load_trained
from trainer.models.state_dict import save_weights, whole_weights
from trainer.parallel.layout import Layout, layout_of
from trainer.parallel.mesh import Ranks


def divided(ranks: Ranks, directory: Path, settings: TrainerSettings) -> dict[str, Any] | None:
    return two_updates(directory, settings, ranks.arranged(layout_of(settings)))


def several(ranks: Ranks, cases: Sequence[tuple[Path, TrainerSettings]]) -> list[dict[str, Any] | None]:
    """Run `divided` several times in the same processes."""
    return [divided(ranks, directory, settings) for directory, settings in cases]


def beside(ranks: Ranks, directory: Path, settings: TrainerSettings, layout: str) -> dict[str, Any] | None:
    """Train a transformers model on ranks that divide another one."""
    return two_updates(directory, settings, ranks.arranged(Layout.parse(layout)))


def published(ranks: Ranks, directory: Path, settings: TrainerSettings, target: Path) -> None:
    """Write the weights of a divided model as a version's files."""
    model_ranks = ranks.arranged(layout_of(settings))
    model = load_trained(directory, settings, model_ranks)
    tensors = whole_weights(model.named_weights(), model_ranks)
    if ranks.is_first:
        save_weights(tensors, target)


def full(ranks: Ranks, directory: Path, settings: TrainerSettings) -> None:
    """Let the last rank run out of memory in a forward pass: it reports it as without a pipeline, and the others lose
    it."""
    ranks = ranks.arranged(layout_of(settings))
    model = load_trained(directory, settings, ranks)
    rows = [each.rows for each in batch_of(settings)[0].micro_batches]
    is_last = ranks.rank == ranks.size - 1

    def is_full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    if is_last:
        model.layers[0].register_forward_pre_hook(is_full)
    with pytest.raises(torch.OutOfMemoryError if is_last else RuntimeError):
        model.learn(rows, lambda number, scores: scores.logprobs_N.sum())


def refused(ranks: Ranks, directory: Path, settings: TrainerSettings) -> str:
    """Return the error for a refused layout."""
    with pytest.raises(ConfigurationError) as refusal:
        load_trained(directory, settings, ranks.arranged(layout_of(settings)))
    return str(refusal.value)
