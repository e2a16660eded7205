"""The use of the engine's time and of the GPUs' arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from proxy.contract.claim import EngineReading
from trainer.algorithm.parts import Algorithm
from trainer.batching.packing import MicroBatch, MiniBatch
from trainer.config import Precision
from trainer.models.stored import StoredTensors

_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
# Names of embeddings and output heads in stored weights. A look-up is no arithmetic, and the head is counted
# separately.
_ENDS = ("embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out")


class EngineIdle:
    """The share of time between the claims of two steps in which the engine was idle."""

    def __init__(self) -> None:
        self._last: EngineReading | None = None

    def ratio(self, reading: EngineReading | None) -> float | None:
        """Return the share since the last reading. Return None for the first reading, and if another process of the
        proxy gave the last one, since each process counts from its own start."""
        last, self._last = self._last, reading
        if last is None or reading is None or reading.process != last.process or reading.seconds <= last.seconds:
            return None
        return 1.0 - (reading.busy_seconds - last.busy_seconds) / (reading.seconds - last.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Floating-point operations of a forward pass: per token in the layers, per predicted token in the output head,
    and per pair of a token and a token that it attends to, itself included."""

    per_token: int
    per_prediction: int
    per_pair: int

    @staticmethod
    def of(directory: Path) -> ModelFlops | None:
        """Return the operations of the model in a directory, by convention those of its matrix multiplications; of
        experts, those that a token is routed to. Return None if config.json lacks the usual names of sizes."""
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(directory).get_text_config()
        layers, heads, hidden, vocabulary = (getattr(config, name, None) for name in _SIZES)
        if not (layers and heads and hidden and vocabulary):
            return None
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        used = (getattr(config, "num_experts_per_tok", None) or experts) / experts if experts else 1.0
        matrices = [
            math.prod(shape) * (used if ".experts." in name else 1.0)
            for name, shape in StoredTensors(directory).shapes.items()
            if len(shape) > 1 and name.split(".")[-2] not in _ENDS
        ]
        return ModelFlops(
            per_token=2 * round(sum(matrices)),
            per_prediction=2 * vocabulary * hidden,
            per_pair=4 * layers * heads * (getattr(config, "head_dim", None) or hidden // heads),
        )

    def forward(self, tokens: int, pairs: int, predictions: int) -> int:
        return self.per_token * tokens + self.per_pair * pairs + self.per_prediction * predictions

    def of_step(self, mini_batches: Iterable[MiniBatch], algorithm: Algorithm) -> int:
        """Return the operations of all ranks together. A backward pass counts as two forward passes. Recomputed
        activations and padding are not counted."""
        again = int(algorithm.looks_first) + int(algorithm.has_divergence)
        total = 0
        for micro_batch in (one for each in mini_batches for one in each.micro_batches):
            passes = (3 if micro_batch.learns else 1) + again
            total += passes * self.forward(*counted_tokens(micro_batch))
        return total


class _Peak(NamedTuple):
    """Dense floating-point operations per second, from the vendor's data sheet."""

    bfloat16: float
    tf32: float
    float32: float


PEAKS: dict[str, _Peak] = {
    "B200": _Peak(2250e12, 1125e12, 75e12),
    "H200": _Peak(989e12, 494e12, 67e12),
    "H100 PCIe": _Peak(756e12, 378e12, 51e12),
    "H100 NVL": _Peak(835e12, 417e12, 60e12),
    "H100": _Peak(989e12, 494e12, 67e12),
    "A100": _Peak(312e12, 156e12, 19.5e12),
    "A40": _Peak(150e12, 75e12, 37.4e12),
    "L40S": _Peak(362e12, 183e12, 91.6e12),
    "L4": _Peak(121e12, 60e12, 30.3e12),
    "RTX 4090": _Peak(165e12, 82.6e12, 82.6e12),
    "RTX 3090": _Peak(71e12, 35.6e12, 35.6e12),
    "MI300X": _Peak(1307e12, 654e12, 163e12),
}
"""Peaks by a part of the device's name. A name that contains another one comes before it."""


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the peak of one device in the arithmetic that the trainer uses; None for a device that is not in the
    table."""
    name = device_name.replace("-", " ").split()
    for known, peak in PEAKS.items():
        words = known.split()
        if any(name[start : start + len(words)] == words for start in range(len(name))):
            if precision is Precision.BFLOAT16:
                return peak.bfloat16
            return peak.float32 if torch.get_float32_matmul_precision() == "highest" else peak.tf32
    return None


def counted_tokens(batch: MicroBatch) -> tuple[int, int, int]:
    """Return the numbers of tokens, attended pairs and predictions. A token attends to all tokens before it and to
    itself."""
    lengths_B1 = batch.lengths_B.to(batch.position_ids_BT.device)[:, None]
    real_BT = torch.arange(batch.position_ids_BT.shape[1], device=lengths_B1.device) < lengths_B1
    pairs = int((batch.position_ids_BT + 1)[real_BT].sum())
    return int(real_BT.sum()), pairs, len(batch.targets_N)
