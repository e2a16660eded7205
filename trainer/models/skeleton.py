"""Models without memory for their weights: a rank of a divided model allocates only its own part.

A skeleton's tensors are on the device `meta`. It is divided first; `furnish` then allocates this rank's parts, and
the weights are read into them. Whatever has to be tried by computing is tried with a small stand-in of the same
architecture.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from trainer.errors import UnsupportedModel
from trainer.models.dropout import remove_dropout

FEW_TOKENS = 64
"""The vocabulary of a stand-in. Trials use token ids below 10."""
_LOGITS = 20.0
"""Size of a stand-in's logits: that of trained models, at which a softcap or a scale after the head shows."""

_SWAPPING = threading.Lock()


def transformer_skeleton(directory: Path, *, activation_checkpointing: bool) -> Any:
    """Return the transformers model of a directory with all its tensors on `meta`, without dropout. Raises
    UnsupportedModel."""
    inner = _defined(_config_of(directory), torch.device("meta"), directory)
    if activation_checkpointing:
        inner.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    remove_dropout(inner)
    return inner


def has_skeleton(directory: Path) -> bool:
    """Return whether a skeleton of the model in a directory is furnished with the same buffers as the model itself,
    and the files have nothing that a skeleton would not read: buffers, or quantised weights."""
    if getattr(_config_of(directory), "quantization_config", None) is not None:
        return False
    whole, skeleton = stand_in(directory, torch.device("cpu")), stand_in(directory, torch.device("meta"))
    if set(whole.state_dict()) - {name for name, _ in whole.named_parameters(remove_duplicate=False)}:
        return False
    furnish(skeleton, torch.device("cpu"))
    made = dict(skeleton.named_buffers())
    return all(
        name in made and made[name].dtype == buffer.dtype and torch.equal(made[name], buffer)
        for name, buffer in whole.named_buffers()
    )


def stand_in(directory: Path, device: torch.device) -> Any:
    """Return a small model of the architecture in a directory: a layer of each kind, few tokens, and random weights
    of such a size that each part of the model shows in the results. Equal calls give equal models.

    Raises UnsupportedModel.
    """
    config = _config_of(directory)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    layers = 1 if kinds is None else max(kinds.index(kind) for kind in set(kinds)) + 1
    text.num_hidden_layers = min(layers, text.num_hidden_layers)
    if kinds is not None:
        text.layer_types = list(kinds[: text.num_hidden_layers])
    text.vocab_size = min(text.vocab_size, FEW_TOKENS)
    # They may lie beyond the few tokens, and padding is never looked at.
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    inner = _defined(config, device, directory)
    if device.type == "meta":
        return inner
    draw_weights(inner)
    with torch.no_grad():
        inner.get_output_embeddings().weight.mul_(_LOGITS)
    remove_dropout(inner)
    return inner


def draw_weights(model: nn.Module) -> None:
    """Fill the matrices of a stand-in with random numbers whose size keeps that of what they are applied to. Equal
    calls give equal numbers."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))


def furnish(model: nn.Module, device: torch.device) -> None:
    """Allocate memory on `device` for everything of a model that is on `meta`, sharded or not. Weights have undefined
    values, and buffers those that transformers computes for them. Tied parameters stay tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    # Otherwise `_apply` would replace parameters by new ones, and a parameter of two modules by two.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        cast("Any", model)._apply(
            lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        )
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for owner in model.modules():
        initialise = getattr(owner, "_init_weights", None)
        if initialise is None:
            continue
        for module in owner.modules():
            if any(True for _ in module.buffers(recurse=False)):
                initialise(module)


def _config_of(directory: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{directory}: {error}") from error


def _defined(config: Any, device: torch.device, directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with device:
            inner: Any = cast("Any", AutoModelForCausalLM).from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{directory}: {error}") from error
    return inner


def is_skeleton(model: nn.Module) -> bool:
    """Return whether the model's weights have no memory yet."""
    return next(model.parameters()).is_meta
