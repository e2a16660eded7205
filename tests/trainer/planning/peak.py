"""Print the planned and the measured peak of one training step on this machine, in bytes, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from trainer.algorithm.logprobs import token_logprobs
from trainer.config import OptimizerSettings, Precision
from trainer.models.archon.config import ModelConfig
from trainer.models.archon.model import ArchonModel
from trainer.optimizer import adamw
from trainer.parallel.layout import Layout
from trainer.planning.memory import Work, rank_memory

ROWS, WIDTH = 4, 256
CONFIG = ModelConfig(
    vocabulary=8192,
    hidden=512,
    layers=6,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1536,
    norm_eps=1e-6,
    rope_theta=1e6,
    tied=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    experts=None,
)


def main() -> None:
    torch.set_num_threads(1)
    _step(ArchonModel(_SMALL, Precision.FLOAT32, token_logprobs), 1, 8)  # libraries are loaded
    before = _kilobytes("VmRSS")
    _step(ArchonModel(CONFIG, Precision.FLOAT32, token_logprobs), ROWS, WIDTH)
    measured = (_kilobytes("VmHWM") - before) * 1024
    work = Work(tokens=ROWS * WIDTH, precision=Precision.FLOAT32, on_gpu=False)
    planned = rank_memory(CONFIG, Layout(), work).total
    sys.stdout.write(json.dumps({"planned": planned, "measured": measured}))


_SMALL = ModelConfig(
    vocabulary=64,
    hidden=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate=16,
    norm_eps=1e-6,
    rope_theta=1e6,
    tied=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    experts=None,
)


def _step(model: ArchonModel, rows: int, width: int) -> None:
    """Make two steps: the optimiser's state exists from the first one on."""
    optimizer = adamw(model, OptimizerSettings())
    ids_BT = torch.randint(0, model.vocabulary, (rows, width))
    positions_BT = torch.arange(width).expand(rows, width).contiguous()
    predictor_N = torch.arange(rows * width)
    for _ in range(2):
        logprobs_N, _ = model(ids_BT, positions_BT, predictor_N, ids_BT.flatten(), torch.ones(rows * width))
        logprobs_N.sum().backward()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()


def _kilobytes(name: str) -> int:
    """Read this process's memory: `VmRSS` is the present, `VmHWM` the largest size."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0])


if __name__ == "__main__":
    main()
