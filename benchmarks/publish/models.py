"""Models of a given size, and the steps of AdamW that make their versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Name of the size: hidden size, layers, vocabulary. The heads are of 64, two queries to a key.
SHAPES = {"1M": (128, 3, 2048), "100M": (768, 12, 16384), "500M": (1536, 16, 32768)}
# Numbers that are drawn at once, so that the draw takes little memory.
_PART = 1 << 22


def make_model(size: str, directory: Path) -> dict[str, Tensor]:
    """Write a model of this size with random weights in float32, and return the weights by name."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden, layers, vocabulary = SHAPES[size]
    heads = hidden // 64
    config: Any = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model: Any = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    # A tied head is stored once.
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def take_step(weights: Mapping[str, Tensor], learning_rate: float, seed: int) -> None:
    """Move the weights as a step of AdamW in the course of a training does: every one by about the learning rate, in
    either direction. The ratio of the moments is drawn from the uniform distribution."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights.values():
        flat = weight.view(-1)
        for begin in range(0, len(flat), _PART):
            part = flat[begin : begin + _PART]
            part.add_(torch.empty_like(part).uniform_(-1, 1, generator=generator), alpha=learning_rate)
