"""Idle engines and counted arithmetic."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from proxy.contract.claim import ClaimedBatch, EngineReading
from proxy.contract.identifiers import ClaimId
from tests.trainer.models.archon.shapes import save_random
from tests.trainer.tiny import GRPO, group_of, settings, trajectory, turn
from trainer.algorithm.logprobs import token_logprobs
from trainer.algorithm.running import RunningMeans
from trainer.batching.packing import MicroBatch, idle_micro_batch
from trainer.batching.preparation import prepare
from trainer.config import Packing, Precision
from trainer.models.archon.weights import load_archon
from trainer.models.huggingface import load_policy
from trainer.observe.utilisation import PEAKS, EngineIdle, ModelFlops, counted_tokens, peak_flops


def reading(process: str, seconds: float, busy: float) -> EngineReading:
    return EngineReading(process=process, seconds=seconds, busy_seconds=busy)


def test_an_engine_is_idle_when_it_was_not_busy() -> None:
    idle = EngineIdle()
    assert idle.ratio(reading("a", 10.0, 9.0)) is None
    assert idle.ratio(reading("a", 20.0, 11.5)) == 0.75
    assert idle.ratio(reading("a", 24.0, 15.5)) == 0.0


def test_counters_of_two_proxy_processes_are_not_compared() -> None:
    idle = EngineIdle()
    idle.ratio(reading("a", 10.0, 9.0))
    assert idle.ratio(reading("b", 30.0, 1.0)) is None
    assert idle.ratio(None) is None
    assert idle.ratio(reading("b", 40.0, 2.0)) is None
    assert idle.ratio(reading("b", 50.0, 12.0)) == 0.0


@pytest.mark.parametrize(
    ("name", "load"),
    [("qwen2", load_policy), ("qwen3", load_policy), ("qwen3", load_archon), ("qwen3_moe", load_archon)],
)
def test_the_arithmetic_of_a_pass_is_what_torch_counts(name: str, load: Any, tmp_path: Path) -> None:
    """torch counts attention over all pairs of a row, as the test requests here."""
    save_random(tmp_path, name)
    model = load(tmp_path, Precision.FLOAT32, token_logprobs, activation_checkpointing=False)
    flops = ModelFlops.of(tmp_path)
    assert flops is not None
    rows, width = 3, 16
    ids = torch.randint(1, 64, (rows, width), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(width).repeat(rows, 1)
    predictor = torch.arange(5)
    arguments = (ids, positions, predictor, torch.ones(5, dtype=torch.long), torch.ones(5))
    counter = FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        logprobs, _ = model(*arguments)
        forward = counter.get_total_flops()
        logprobs.sum().backward()
    assert forward == flops.forward(rows * width, rows * width * width, 5)
    # The head is chunked and computed again in the backward pass, which is not part of the model's own arithmetic.
    again = flops.per_prediction * 5
    assert counter.get_total_flops() - forward in (2 * forward, 2 * forward + again)


def packed(packing: Packing, *lengths: int) -> list[MicroBatch]:
    turns = [
        trajectory(turn([4] * length, prompt=(1, 2, 3)), reward=float(number))
        for number, length in enumerate(lengths)
    ]
    claimed = ClaimedBatch(claim_id=ClaimId("c"), lease_expires_at=0.0, base_version=0, groups=(group_of(turns),))
    configured = settings(Path())
    prepared = prepare(claimed, 0, configured.batch, GRPO, RunningMeans.fresh(0.9), 64)
    chosen = configured.batch.model_copy(update={"packing": packing})
    in_one_step = dataclasses.replace(GRPO, mini_batches=1)
    return [each for mini_batch in prepared.packed(chosen, in_one_step) for each in mini_batch.micro_batches]


@pytest.mark.parametrize("packing", [Packing.PADDED, Packing.PACKED])
@pytest.mark.parametrize("lengths", [(5, 5), (20, 3, 1), (40, 2), (1, 1, 1, 1, 25, 26, 27)])
def test_padding_is_not_counted(packing: Packing, lengths: tuple[int, ...]) -> None:
    counted = [counted_tokens(each) for each in packed(packing, *lengths)]
    whole = [3 + length for length in lengths]
    assert [sum(column) for column in zip(*counted, strict=True)] == [
        sum(whole),
        sum(length * (length + 1) // 2 for length in whole),
        sum(lengths),
    ]


def test_shared_tokens_are_counted_once() -> None:
    """One sequence continues the other, so only the longer one is computed."""
    (one,) = packed(Packing.TREE, 5, 3)
    assert counted_tokens(one) == (8, 8 * 9 // 2, 8)


def test_a_step_counts_every_pass(tiny_model: Path) -> None:
    flops = ModelFlops.of(tiny_model)
    assert flops is not None
    batch: Any = type("MiniBatch", (), {"micro_batches": (idle_micro_batch(True), idle_micro_batch(False))})
    one = flops.forward(1, 1, 0)
    assert flops.of_step([batch], GRPO) == (3 + 1 + 2 * GRPO.looks_first) * one


def test_the_peak_is_the_devices() -> None:
    for name, known in (
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
    ):
        assert peak_flops(name, Precision.BFLOAT16) == PEAKS[known].bfloat16
        assert peak_flops(name, Precision.FLOAT32) == PEAKS[known].float32
    assert peak_flops("NVIDIA A1000", Precision.BFLOAT16) is None
    assert peak_flops("cpu", Precision.FLOAT32) is None
