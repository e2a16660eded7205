"""The parts of `config.json` that a model's definition depends on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import UnsupportedModel
from trainer.parallel.layout import ModelShape

ARCHITECTURES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE"}
"""Supported architectures: `model_type` in config.json → name for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Sizes of a mixture of experts. `normalised`: the weights of a token's experts sum to one. `dense`: the layers
    that have a plain MLP instead."""

    count: int
    per_token: int
    intermediate: int
    normalised: bool
    dense: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope_theta: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    experts: ExpertsConfig | None

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense

    @property
    def shape(self) -> ModelShape:
        dense = any(not self.is_sparse(layer) for layer in range(self.layers))
        return ModelShape(
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            intermediate=self.intermediate if dense else 0,
            experts=self.experts.count if self.experts is not None else 0,
        )


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration of a model. Raises UnsupportedModel for an architecture, or a part of one, that the
    archon backend does not define."""
    from transformers import AutoConfig

    try:
        found: Any = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{directory}: {error}") from error
    if found.model_type not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{directory}: the archon backend defines {', '.join(ARCHITECTURES.values())}, but not"
            f' {found.model_type}; use trainer.backend = "fsdp"'
        )
    rope = found.rope_parameters
    bias = found.model_type == "qwen2" or bool(found.attention_bias)
    for part, wrong in {
        f"rope type {rope['rope_type']}": rope["rope_type"] != "default",
        f"activation {found.hidden_act}": found.hidden_act != "silu",
        "sliding-window attention": bool(found.use_sliding_window),
    }.items():
        if wrong:
            raise UnsupportedModel(f'{directory}: the archon backend has no {part}; use trainer.backend = "fsdp"')
    head_dim = getattr(found, "head_dim", None) or found.hidden_size // found.num_attention_heads
    return ModelConfig(
        vocabulary=found.vocab_size,
        hidden=found.hidden_size,
        layers=found.num_hidden_layers,
        heads=found.num_attention_heads,
        kv_heads=found.num_key_value_heads,
        head_dim=head_dim,
        intermediate=found.intermediate_size,
        norm_eps=found.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        tied=bool(found.tie_word_embeddings),
        qkv_bias=bias,
        output_bias=bias and found.model_type != "qwen2",
        qk_norm=found.model_type != "qwen2",
        experts=_experts(found) if found.model_type == "qwen3_moe" else None,
    )


def _experts(found: Any) -> ExpertsConfig:
    sparse = {
        layer
        for layer in range(found.num_hidden_layers)
        if found.num_experts > 0
        and layer not in found.mlp_only_layers
        and (layer + 1) % found.decoder_sparse_step == 0
    }
    return ExpertsConfig(
        count=found.num_experts,
        per_token=found.num_experts_per_tok,
        intermediate=found.moe_intermediate_size,
        normalised=bool(found.norm_topk_prob),
        dense=frozenset(range(found.num_hidden_layers)) - sparse,
    )
