"""Models of a few thousand parameters, as transformers initialises them."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
}
"""A shape in the terms of transformers' configurations."""


def small_qwen3(**changes: Any) -> Any:
    """Return a tied model of this shape with `changes` to its configuration, drawn from torch's own generator."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "tie_word_embeddings": True, **changes}))
