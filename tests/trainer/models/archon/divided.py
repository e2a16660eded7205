"""What the processes of a gang run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.models.archon.steps import two_updates
from trainer.config import TrainerSettings
from trainer.errors import ConfigurationError
from trainer.loading import load_trained
from trainer.models.state_dict import gather_weights, save_weights
from trainer.parallel.layout import Layout, layout_of
from trainer.parallel.mesh import Ranks


def divided(ranks: Ranks, directory: Path, settings: TrainerSettings) -> dict[str, Any] | None:
    return two_updates(directory, settings, ranks.arranged(layout_of(settings)))


def beside(ranks: Ranks, directory: Path, settings: TrainerSettings, layout: str) -> dict[str, Any] | None:
    """A model of transformers among ranks that divide another one."""
    return two_updates(directory, settings, ranks.arranged(Layout.parse(layout)))


def published(ranks: Ranks, directory: Path, settings: TrainerSettings, target: Path) -> None:
    """Writes the weights of a divided model as a version has them."""
    model = load_trained(directory, settings, ranks.arranged(layout_of(settings)))
    tensors = gather_weights(model.named_weights(), keep=ranks.is_first)
    if ranks.is_first:
        save_weights(tensors, target)


def refused(ranks: Ranks, directory: Path, settings: TrainerSettings) -> str:
    """What is said where a layout is refused."""
    with pytest.raises(ConfigurationError) as refusal:
        load_trained(directory, settings, ranks.arranged(layout_of(settings)))
    return str(refusal.value)
