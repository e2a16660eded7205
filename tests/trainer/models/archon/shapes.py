"""Small random checkpoints of each architecture that archon defines, written by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.small_models import small_qwen3

VOCABULARY = 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}


def _qwen2(**changes: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**{**_COMMON, "tie_word_embeddings": True, **changes}))


def _qwen3(**changes: Any) -> Any:
    return small_qwen3(**{**_COMMON, **changes})


def _qwen3_biased(**changes: Any) -> Any:
    return _qwen3(attention_bias=True, tie_word_embeddings=False, rope_theta=1e6, **changes)


def _qwen3_moe(**changes: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    last = {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**_COMMON, **sparse, **last, **changes}))


def _qwen3_moe_odds(**changes: Any) -> Any:
    return _qwen3_moe(norm_topk_prob=False, mlp_only_layers=[], tie_word_embeddings=True, **changes)


MODELS: dict[str, Callable[..., Any]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_biased": _qwen3_biased,
    "qwen3_moe": _qwen3_moe,
    "qwen3_moe_odds": _qwen3_moe_odds,
}


def save_random(directory: Path, name: str, **changes: Any) -> Any:
    """Save the model with random weights and norms far from their defaults, and return it."""
    torch.manual_seed(0)
    model = MODELS[name](**changes)
    with torch.no_grad():
        for weight_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.normal_(0 if weight_name.endswith("bias") else 1, 0.3)
    model.save_pretrained(directory)
    return model.eval()
