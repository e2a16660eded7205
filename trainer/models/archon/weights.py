"""Load a model of the archon backend from a directory in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.config import Precision
from trainer.errors import UnsupportedModel, WeightsUnusable
from trainer.models.archon.config import read_config
from trainer.models.archon.model import TIED_HEAD, ArchonModel, Block
from trainer.models.huggingface import TokenLogprobs
from trainer.models.state_dict import load_weights, names_on_disk, stored_names


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
    config = read_config(directory)
    with torch.device("meta"):
        model = ArchonModel(config, precision, token_logprobs)
    model.to_empty(device="cpu")
    if config.tied:
        model.causal.tie()
    try:
        ours = {on_disk for name, weight in model.named_weights() for on_disk in names_on_disk(name, len(weight))}
        stored = stored_names(directory) - ({TIED_HEAD} if config.tied else set())
        if ours != stored:
            odd = sorted(ours ^ stored)[0]
            said = "is missing from the files" if odd in ours else "is in the files and not in the definition"
            raise UnsupportedModel(f"{directory}: {odd} {said}")
        load_weights(model.named_weights(), directory)
    except WeightsUnusable as error:
        raise UnsupportedModel(str(error)) from error
    for block in model.layers:
        if isinstance(block, Block):
            block.checkpointed = activation_checkpointing
    return model.train()
