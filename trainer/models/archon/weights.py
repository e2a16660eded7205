"""Load a model of the archon backend from a directory in Hugging Face's format."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from trainer.config import Precision
from trainer.errors import UnsupportedModel, WeightsUnusable
from trainer.models.archon.config import read_config
from trainer.models.archon.model import TIED_HEAD, ArchonModel, Block
from trainer.models.huggingface import TokenLogprobs
from trainer.models.skeleton import FEW_TOKENS, draw_weights, furnish
from trainer.models.state_dict import names_on_disk
from trainer.models.stored import StoredTensors


def load_archon(
    directory: Path,
    precision: Precision,
    token_logprobs: TokenLogprobs,
    *,
    activation_checkpointing: bool,
) -> ArchonModel:
    """Load the model in a directory with float32 weights on the CPU.

    Raises UnsupportedModel, also if the files have other weights than the definition.
    """
    model = archon_skeleton(directory, precision, token_logprobs, activation_checkpointing=activation_checkpointing)
    furnish(model, torch.device("cpu"))
    try:
        model.load_base(directory)
    except WeightsUnusable as error:
        raise UnsupportedModel(str(error)) from error
    return model


def archon_skeleton(
    directory: Path,
    precision: Precision,
    token_logprobs: TokenLogprobs,
    *,
    activation_checkpointing: bool,
) -> ArchonModel:
    """Return the model in a directory without its weights, as a skeleton (`models/skeleton.py`).

    Raises UnsupportedModel, also if the files have other weights than the definition.
    """
    config = read_config(directory)
    with torch.device("meta"):
        model = ArchonModel(config, precision, token_logprobs)
    try:
        stored = StoredTensors(directory).names - ({TIED_HEAD} if config.tied else set())
    except WeightsUnusable as error:
        raise UnsupportedModel(str(error)) from error
    ours = {on_disk for name, weight in model.named_weights() for on_disk in names_on_disk(name, len(weight))}
    if ours != stored:
        odd = sorted(ours ^ stored)[0]
        said = "is missing from the files" if odd in ours else "is in the files and not in the definition"
        raise UnsupportedModel(f"{directory}: {odd} {said}")
    for block in model.layers:
        if isinstance(block, Block):
            block.checkpointed = activation_checkpointing
    return model.train()


def archon_stand_in(directory: Path, precision: Precision, token_logprobs: TokenLogprobs) -> ArchonModel:
    """Return a model of one dense layer with the widths of the model in a directory, few tokens and random weights:
    attention is tried with it. Raises UnsupportedModel."""
    config = dataclasses.replace(read_config(directory), layers=1, vocabulary=FEW_TOKENS, experts=None)
    model = ArchonModel(config, precision, token_logprobs)
    draw_weights(model)
    return model.train()
