"""Shapes of models: of a directory, of a Hugging Face id, or one of those that need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from trainer.errors import ConfigurationError
from trainer.models.archon.config import ExpertsConfig, ModelConfig

_VOCABULARY = 151936

KNOWN: Final[dict[str, ModelConfig]] = {
    "Qwen/Qwen2.5-1.5B": ModelConfig(
        vocabulary=_VOCABULARY,
        hidden=1536,
        layers=28,
        heads=12,
        kv_heads=2,
        head_dim=128,
        intermediate=8960,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=True,
        qkv_bias=True,
        output_bias=False,
        qk_norm=False,
        experts=None,
    ),
    "Qwen/Qwen3-8B": ModelConfig(
        vocabulary=_VOCABULARY,
        hidden=4096,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=12288,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=False,
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        experts=None,
    ),
    "Qwen/Qwen3-32B": ModelConfig(
        vocabulary=_VOCABULARY,
        hidden=5120,
        layers=64,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=25600,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=False,
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        experts=None,
    ),
    "Qwen/Qwen3-30B-A3B": ModelConfig(
        vocabulary=_VOCABULARY,
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=6144,
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=False,
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        experts=ExpertsConfig(count=128, per_token=8, intermediate=768, normalised=True, dense=frozenset()),
    ),
}
"""Models whose shape is known without their files."""


def shape_of(model: str) -> ModelConfig:
    """Return the shape of a model. Raise ConfigurationError if it is none, UnsupportedModel for an architecture that
    the trainer's own definitions do not have."""
    if model in KNOWN:
        return KNOWN[model]
    from trainer.models.archon.config import read_config

    directory = Path(model).expanduser()
    if directory.is_dir():
        return read_config(directory)
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ConfigurationError(f"{model} is no directory: name one with a config.json, or a Hugging Face id")
    from huggingface_hub import hf_hub_download

    try:
        return read_config(Path(hf_hub_download(model, "config.json")).parent)
    except (OSError, ValueError) as error:
        known = ", ".join(KNOWN)
        raise ConfigurationError(
            f"the config.json of {model} could not be had from Hugging Face ({error}); name a directory with it, or"
            f" one of {known}"
        ) from error
