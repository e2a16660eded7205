"""FSDP2 over the device's own collectives with one process: sharding does not change a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.device import relative
from tests.gpu.test_training import loaded
from tests.trainer.models.archon.shapes import save_random
from tests.trainer.models.test_attention import a_batch
from trainer.algorithm.presets import resolve
from trainer.batching.packing import mini_batches
from trainer.batching.sequences import linearise
from trainer.config import AlgorithmSettings, BatchSettings, OptimizerSettings, Packing
from trainer.models.state_dict import gather_weights
from trainer.parallel.fsdp import shard
from trainer.parallel.mesh import Ranks
from trainer.update import Learner

pytestmark = pytest.mark.gpu


@pytest.fixture
def group(device: torch.device, tmp_path: Path) -> Iterator[None]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("backend", ["fsdp", "archon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sharded_steps_are_those_of_the_whole_model(
    ranks: Ranks, backend: str, precision: str, tmp_path: Path
) -> None:
    save_random(tmp_path, "qwen3")
    algorithm = resolve(AlgorithmSettings(mini_batches=1))
    batch = a_batch()
    advantages = [[1.0 - index] * 3 for index in range(len(batch.trajectories))]
    packed = mini_batches(
        batch, advantages, linearise(batch.trajectories), BatchSettings(packing=Packing.TREE), algorithm
    )
    norms, weights = [], []
    for sharded in (False, True):
        model = loaded(tmp_path, ranks, backend=backend, precision=precision)
        if sharded:
            shard(model, model.layers, ranks)
        learner = Learner(model, algorithm, OptimizerSettings(learning_rate=1e-3, eps=1e-4), ranks)
        norms.append([learner.update(packed).gradient_norm for _ in range(2)])
        weights.append(gather_weights(model.named_weights(), keep=True))
        assert len(learner.capture()["optimizer"]) > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-4 if precision == "float32" else 2e-2)
    for name, weight in weights[0].items():
        assert relative(weights[1][name], weight) < (1e-5 if precision == "float32" else 1e-3), name
