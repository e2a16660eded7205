"""Models of a given size, and the steps that make their versions."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.trainer.workloads import shared_prefix
from trainer.algorithm.presets import resolve
from trainer.batching.packing import mini_batches
from trainer.batching.sequences import linearise
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, Packing, TrainerSettings
from trainer.loading import load_trained
from trainer.parallel.mesh import Ranks
from trainer.update import Learner

# Name of the size: hidden size, layers, vocabulary. The heads are of 64, two queries to a key.
SHAPES = {"1M": (128, 2, 4096), "100M": (768, 10, 16384), "500M": (1536, 16, 32768)}
LEARNT = ("1M", "100M")
"""Sizes that are trained. Gradients and moments of larger ones would not fit beside an engine, so their weights are
moved at random."""
# Steps before the first one that is measured: AdamW's very first one moves every weight by the whole learning rate.
_WARM_UP = 3
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


class Trained:
    """A model that learns by GRPO from made-up answers, whose log-probabilities are the policy's own."""

    def __init__(self, directory: Path) -> None:
        self._ranks = Ranks(0, 1, torch.device("cpu"), None)
        self._algorithm = resolve(AlgorithmSettings(preset="grpo", mini_batches=1))
        self._model = load_trained(directory, TrainerSettings(), self._ranks)
        self._numbers = random.Random(0)
        self._learner: Learner | None = None

    def at(self, learning_rate: float) -> None:
        """Begin with a new optimiser at this rate, and warm its moments up."""
        settings = OptimizerSettings(learning_rate=learning_rate)
        self._learner = Learner(self._model, self._algorithm, settings, self._ranks)
        for _ in range(_WARM_UP):
            self.step()

    def step(self) -> None:
        """Take a step from a batch of its own."""
        assert self._learner is not None
        workload = shared_prefix(self._numbers, 1, prefix=32, answer=16)
        sequences = linearise(workload.batch.trajectories)
        packed = mini_batches(
            workload.batch, workload.advantages, sequences, BatchSettings(packing=Packing.PADDED), self._algorithm
        )
        if not self._learner.update(packed).stepped:
            raise RuntimeError("the benchmark's batch had no gradient")

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._model.named_weights()}


class Moved:
    """Weights that move as in a step of AdamW in the course of a training: each by up to the learning rate."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._generator = torch.Generator().manual_seed(0)
        self._learning_rate = 0.0

    def at(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate

    def step(self) -> None:
        for weight in self._weights.values():
            flat = weight.view(-1)
            for begin in range(0, len(flat), _PART):
                part = flat[begin : begin + _PART]
                moved = torch.empty_like(part).uniform_(-1, 1, generator=self._generator)
                part.add_(moved, alpha=self._learning_rate)

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights


def model_of(size: str, directory: Path) -> Trained | Moved:
    """Write a model of this size to a directory, and return it with the way in which it changes."""
    weights = make_model(size, directory)
    return Trained(directory) if size in LEARNT else Moved(weights)
