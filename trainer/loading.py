"""Models as the ranks hold them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import structlog

from trainer.algorithm.logprobs import token_logprobs
from trainer.config import Packing, TrainerSettings
from trainer.models.archon.model import ArchonModel
from trainer.models.archon.weights import load_archon
from trainer.models.huggingface import PolicyModel, load_policy
from trainer.models.value import ValueModel, load_value
from trainer.parallel.mesh import Ranks

_log = structlog.get_logger("trainer")

_Model = TypeVar("_Model", PolicyModel, ValueModel)


def load_trained(directory: Path, settings: TrainerSettings, ranks: Ranks) -> PolicyModel:
    """The model of a directory on the ranks' device, divided among them. A collective.

    Raises UnsupportedModel, and ConfigurationError where the ranks' layout does not fit the model.
    """
    model = _load(directory, settings, activation_checkpointing=settings.activation_checkpointing)
    asked = settings.batch.packing
    if asked not in model.packings and ranks.is_first:
        _log.warning("the model does not take this packing", asked=asked.value, used=Packing.PADDED.value)
    return _placed(model, ranks)


def load_reference(directory: Path, settings: TrainerSettings, ranks: Ranks) -> PolicyModel:
    """The same, never to be trained."""
    model = _load(directory, settings, activation_checkpointing=False)
    return _placed(model.requires_grad_(False).eval(), ranks)


def load_critic(directory: Path, settings: TrainerSettings, ranks: Ranks) -> ValueModel:
    """A critic that begins with the transformer of a directory, which is transformers' own whatever the backend. A
    collective. Raises UnsupportedModel."""
    return _placed(
        load_value(directory, settings.precision, activation_checkpointing=settings.activation_checkpointing),
        ranks,
    )


def _load(directory: Path, settings: TrainerSettings, *, activation_checkpointing: bool) -> PolicyModel:
    load = load_archon if settings.backend == "archon" else load_policy
    return load(directory, settings.precision, token_logprobs, activation_checkpointing=activation_checkpointing)


def _placed(model: _Model, ranks: Ranks) -> _Model:
    model = model.to(ranks.device)
    if ranks.size > 1:
        if isinstance(model, ArchonModel):
            from trainer.models.archon.dividing import divide

            divide(model, ranks)
        else:
            from trainer.parallel.fsdp import shard

            shard(model, model.layers, ranks)
    return model
