"""Training steps of a random model in the shape of Qwen3-0.6B on one device, with their time and memory."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainer.workloads import Workload, sessions_of, shared_prefix
from trainer.algorithm.logprobs import token_logprobs
from trainer.algorithm.presets import resolve
from trainer.batching.packing import MiniBatch, mini_batches
from trainer.batching.sequences import linearise
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, Packing, TrainerSettings
from trainer.loading import load_trained
from trainer.observe.utilisation import ModelFlops, peak_flops
from trainer.parallel.mesh import Ranks
from trainer.update import Learner

_GRPO = resolve(AlgorithmSettings(mini_batches=1))
# so small that a step does not change the weights: every repetition computes the same
_OPTIMIZER = OptimizerSettings(learning_rate=1e-12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the model and its data. Rows are full, with `tokens` tokens; a group has a prompt of `prefix` tokens
    and eight answers of an eighth of that. `head`: vocabulary and number of tokens for the log-probabilities."""

    model: dict[str, Any]
    tokens: int
    rows: int
    prefix: int
    groups: int
    microbatch: int
    head: tuple[int, int]
    chunks: tuple[int, ...]


QWEN3_0_6B = Size(
    model={
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    tokens=4096,
    rows=32,
    prefix=512,
    groups=64,
    microbatch=16_384,
    head=(151_936, 16_384),
    chunks=tuple(1 << power for power in range(24, 31)),
)
TINY = Size(
    model={
        "vocab_size": 4096,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    tokens=64,
    rows=2,
    prefix=64,
    groups=2,
    microbatch=512,
    head=(4096, 64),
    chunks=(1 << 14, 1 << 16),
)


def save_model(size: Size, directory: Path, device: torch.device) -> int:
    """Save a random model, and return the number of its parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    with device:
        model: Any = Qwen3ForCausalLM(Qwen3Config(**size.model))
    model.to(torch.bfloat16).save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def full_rows(size: Size) -> Workload:
    """Return sessions of a half, a quarter and two eighths of a row, which fill rows. A quarter of each is its
    prompt."""
    numbers = random.Random(1)
    lengths = [size.tokens // part for _ in range(size.rows) for part in (2, 4, 8, 8)]
    return sessions_of(numbers, [(length // 4, length - length // 4) for length in lengths])


def whole_rows(size: Size) -> Workload:
    """Return sessions as long as a row."""
    return sessions_of(random.Random(2), [(size.tokens // 4, size.tokens - size.tokens // 4)] * size.rows)


def branches(size: Size) -> Workload:
    return shared_prefix(random.Random(3), size.groups, size.prefix, size.prefix // 8)


class Engine:
    """A learner of one backend in bfloat16, with measurements of its steps."""

    def __init__(self, directory: Path, device: torch.device, size: Size, **options: Any) -> None:
        settings = TrainerSettings.model_validate({"precision": "bfloat16", **options})
        ranks = Ranks(0, 1, device, None)
        model = load_trained(directory, settings, ranks)
        flops = ModelFlops.of(directory)
        if flops is None:
            raise AssertionError("the shape says its sizes by the usual names")
        self.by_blocks = model.by_blocks
        self._flops = flops
        self._peak = peak_flops(device_name(device), settings.precision)
        self._device, self._size = device, size
        self._learner = Learner(model, _GRPO, _OPTIMIZER, ranks)

    def step(self, workload: Workload, packing: Packing, rounds: int) -> dict[str, Any]:
        """Return the median seconds of a step after an uncounted first one, with its gradient and its use of the
        GPU."""
        parts = self._laid_out(workload, packing)
        seconds, norm = [], 0.0
        for number in range(rounds + 1):
            if number == 1:
                reset_peak(self._device)
            began = clock(self._device)
            norm = self._learner.update(parts).gradient_norm
            if number:
                seconds.append(clock(self._device) - began)
        taken = statistics.median(seconds)
        arithmetic = self._flops.of_step(parts, _GRPO)
        micro = [each for part in parts for each in part.micro_batches]
        return {
            "seconds": round(taken, 4),
            "tokens": sum(int(each.lengths_B.sum()) for each in micro),
            "trained_tokens": sum(part.trained_tokens for part in parts),
            "micro_batches": len(micro),
            "tflop": round(arithmetic / 1e12, 2),
            "mfu": None if self._peak is None else round(arithmetic / (taken * self._peak), 4),
            "peak_gb": peak_gb(self._device),
            "gradient_norm": norm,
        }

    def _laid_out(self, workload: Workload, packing: Packing) -> list[MiniBatch]:
        settings = BatchSettings(
            packing=packing,
            row_tokens=self._size.tokens if packing is Packing.PACKED else None,
            max_tokens_per_microbatch=self._size.microbatch,
        )
        sequences = linearise(workload.batch.trajectories)
        return mini_batches(workload.batch, workload.advantages, sequences, settings, _GRPO)


def chunked(size: Size, device: torch.device, rounds: int) -> dict[str, dict[str, float | None]]:
    """Compute log-probabilities of many tokens and their gradient, with chunks of different sizes."""
    vocabulary, tokens = size.head
    head = torch.nn.Linear(size.model["hidden_size"], vocabulary, bias=False, device=device)
    hidden = torch.randn(tokens, size.model["hidden_size"], device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    ones = torch.ones(tokens, device=device)

    def act(limit: int) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            logprobs, _ = token_logprobs(head, hidden, targets, ones, vocabulary, limit)
        torch.autograd.backward(logprobs.sum())

    return {str(limit): _timed(device, rounds, lambda limit=limit: act(limit)) for limit in size.chunks}  # type: ignore[misc]


def _timed(device: torch.device, rounds: int, act: Callable[[], None]) -> dict[str, float | None]:
    seconds: list[float] = []
    for number in range(rounds + 1):
        if number == 1:
            reset_peak(device)
        began = clock(device)
        act()
        seconds.append(clock(device) - began)
    return {"seconds": round(statistics.median(seconds[1:]), 5), "peak_gb": peak_gb(device)}


def clock(device: torch.device) -> float:
    """Return the time after the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float | None:
    """Return the peak memory of torch's tensors in GB; None on a CPU, where torch does not count it."""
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def same_gradient(steps: Sequence[dict[str, Any]], bound: float) -> bool:
    norms = [step["gradient_norm"] for step in steps]
    return bool(max(norms) <= (1 + bound) * min(norms))
