"""The planned memory agrees with models as they are built, and with peaks that were measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.tiny import save_tiny_model
from trainer.algorithm import logprobs
from trainer.config import Precision
from trainer.models.archon.config import ExpertsConfig, ModelConfig, read_config
from trainer.models.archon.model import CausalModel
from trainer.parallel.layout import Layout
from trainer.planning import memory
from trainer.planning.memory import Work, layer_parameters, parameters, rank_memory
from trainer.planning.proposals import fits, layouts, propose
from trainer.planning.shapes import KNOWN

GIB = 1 << 30
MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu.json"


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = replace(KNOWN[name], layers=2)
    with torch.device("meta"):
        model = CausalModel(config, Precision.FLOAT32, logprobs.token_logprobs)
    assert parameters(config) == sum(weight.numel() for weight in model.parameters())
    assert layer_parameters(config, 0) == sum(weight.numel() for weight in model.model.layers["0"].parameters())


def test_chunks_of_logits_are_the_trainers() -> None:
    assert memory.LOGITS_PER_CHUNK == logprobs.LOGITS_PER_CHUNK
    assert memory.LOGITS_PER_CHUNK_ON_CUDA == logprobs.LOGITS_PER_CHUNK_ON_CUDA


@pytest.mark.parametrize(("engine", "compiled"), [("fsdp", False), ("archon_eager", False), ("archon", True)])
def test_the_plan_agrees_with_the_peak_measured_on_a_gpu(engine: str, compiled: bool) -> None:
    """The benchmark's model on one H100: rows of 16,384 tokens in bfloat16."""
    found = json.loads(MEASURED.read_text())
    model = found["model"]
    config = ModelConfig(
        vocabulary=model["vocab_size"],
        hidden=model["hidden_size"],
        layers=model["num_hidden_layers"],
        heads=model["num_attention_heads"],
        kv_heads=model["num_key_value_heads"],
        head_dim=model["head_dim"],
        intermediate=model["intermediate_size"],
        norm_eps=1e-6,
        rope_theta=1e6,
        tied=model["tie_word_embeddings"],
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        experts=None,
    )
    assert parameters(config) == model["parameters"]
    steps = found["engines"][engine]["full_rows"]
    work = Work(tokens=steps["tokens"] // steps["micro_batches"], compiled=compiled)
    planned = rank_memory(config, Layout(), work).total
    assert planned == pytest.approx(steps["peak_gb"] * 1e9, rel=0.06)


def test_the_plan_agrees_with_a_peak_measured_here() -> None:
    """A step of a small model in float32 on the CPU, in a process of its own that returns freed memory at once."""
    returning = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "tests.trainer.planning.peak"]
    answer = subprocess.run(command, env={**os.environ, **returning}, check=True, capture_output=True, text=True)
    found = json.loads(answer.stdout)
    assert found["planned"] == pytest.approx(found["measured"], rel=0.2), found


def test_ranks_share_what_a_layout_divides() -> None:
    config = KNOWN["Qwen/Qwen3-8B"]
    alone, eight = (rank_memory(config, Layout(data=size), Work()) for size in (1, 8))
    assert eight.weights * 8 == alone.weights == 4 * parameters(config)
    assert alone.gathered == 0 < eight.gathered
    assert alone.activations == eight.activations, "every rank of d has micro-batches of its own"
    parts = rank_memory(config, Layout(data=2, tensor=4), Work())
    assert (parts.weights, parts.activations * 4) == (eight.weights, eight.activations)
    replicas = rank_memory(config, Layout(replicas=4, data=2), Work())
    assert replicas.weights == 4 * eight.weights
    stages = rank_memory(config, Layout(pipeline=2), Work())
    assert stages.weights < 0.6 * alone.weights


def test_experts_are_gathered_whole_unless_they_are_divided() -> None:
    config = KNOWN["Qwen/Qwen3-30B-A3B"]
    assert isinstance(config.experts, ExpertsConfig)
    whole, divided = (rank_memory(config, Layout(data=8, expert=size), Work()) for size in (1, 8))
    assert divided.gathered < whole.gathered
    assert divided.weights == whole.weights


def test_what_does_not_fit_gets_a_proposal_that_does() -> None:
    config = KNOWN["Qwen/Qwen3-8B"]
    assert not fits(rank_memory(config, Layout(data=8), Work()), 80 * GIB)
    found = propose(config, 8, Work(), 80 * GIB)
    assert found is not None
    assert (found.gpus, found.layout.world) == (8, 8)
    assert fits(rank_memory(config, found.layout, found.work), 80 * GIB)
    larger = propose(config, 1, Work(), 80 * GIB)
    assert larger is not None
    assert larger.gpus > 1, "the optimiser alone takes more than one device"
    assert propose(config, 1, Work(), GIB // 8) is None


def test_proposed_layouts_can_divide_the_model(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    config = read_config(tmp_path)
    for layout in layouts(config, 8):
        layout.check_model(config.shape)
        assert layout.world == 8
