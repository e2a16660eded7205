"""Adapters written by peft, and peft's own network as their reference."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from tests.engines.conftest import Reference

ALL_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path, base: Path, *, seed: int, rank: int = 4, alpha: int = 8, layers: tuple[str, ...] = ALL_LAYERS
) -> Reference:
    """Write a random adapter over `base`, and return its reference."""
    network: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(layers), task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # peft reads a property that transformers has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        adapted: Any = peft.get_peft_model(network, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.15, generator=generator)
    adapted.save_pretrained(directory)
    reference = Reference(base)
    reference.network = adapted.eval()
    return reference


def change_config(directory: Path, **values: Any) -> None:
    """Replace values in an adapter's configuration."""
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
