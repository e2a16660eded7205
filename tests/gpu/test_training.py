"""Steps on the device: in both precisions, with both backends, in every layout, with every preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.training_proxy import TrainingProxy
from tests.gpu.device import relative
from tests.trainer.models.archon.shapes import save_random
from tests.trainer.models.test_attention import micro_batches
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import ALONE, InProcess, build, save_tiny_model, settings
from tests.trainer.weighted import Place, learn
from trainer.algorithm.presets import PRESETS
from trainer.config import Packing, TrainerSettings
from trainer.loading import load_trained
from trainer.models.huggingface import PolicyModel
from trainer.models.state_dict import read_weights
from trainer.parallel.mesh import Ranks

pytestmark = pytest.mark.gpu

Found = tuple[dict[Place, float], dict[str, Tensor]]


def learnt(model: PolicyModel, packing: Packing) -> Found:
    """Return every trained token's log-probability by its place, and the gradient of a sum with different weights."""
    model.zero_grad(set_to_none=True)
    values = learn(model, micro_batches(packing))
    return values, {name: each.grad for name, each in model.named_weights() if each.grad is not None}


def gaps(found: Found, wanted: Found) -> tuple[float, float]:
    """Return the largest difference of log-probabilities, and the relative norm of the difference of all
    gradients."""
    assert found[0].keys() == wanted[0].keys()
    assert found[1].keys() == wanted[1].keys()
    names = list(wanted[1])
    gradient, wanted_gradient = (
        torch.cat([each[1][name].flatten().cpu() for name in names]) for each in (found, wanted)
    )
    return max(abs(found[0][place] - value) for place, value in wanted[0].items()), relative(
        gradient, wanted_gradient
    )


def loaded(directory: Path, ranks: Ranks, **options: Any) -> PolicyModel:
    model = load_trained(directory, TrainerSettings.model_validate(options), ranks)
    assert model.by_blocks is (options.get("attention") != "whole")
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("backend", "name"),
    [("fsdp", "qwen3"), ("fsdp", "qwen2"), ("archon", "qwen3"), ("archon", "qwen2"), ("archon", "qwen3_moe")],
)
def test_trees_and_packed_rows_learn_what_single_sequences_do(
    ranks: Ranks, backend: str, checkpointing: bool, name: str, tmp_path: Path
) -> None:
    """In float32 by flex_attention, compared with rows of one sequence by SDPA, on the device and on the CPU."""
    save_random(tmp_path, name, head_dim=16)  # flex_attention has no kernel for narrower ones
    options = {"backend": backend, "activation_checkpointing": checkpointing}
    blocks = loaded(tmp_path, ranks, **options)
    dense = loaded(tmp_path, ranks, **options, attention="whole")
    wanted = learnt(dense, Packing.PADDED)
    for packing in (Packing.TREE, Packing.PACKED):
        logprobs, gradient = gaps(learnt(blocks, packing), wanted)
        assert logprobs < 2e-4, packing
        assert gradient < 2e-4, packing
    on_cpu = learnt(loaded(tmp_path, ALONE, **options, attention="whole"), Packing.PADDED)
    logprobs, gradient = gaps(wanted, on_cpu)
    assert logprobs < 2e-4
    assert gradient < 2e-4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_compiled_layers_learn_what_others_do(ranks: Ranks, name: str, tmp_path: Path) -> None:
    save_random(tmp_path, name, head_dim=16)
    plain = loaded(tmp_path, ranks, backend="archon")
    compiled = loaded(tmp_path, ranks, backend="archon", compile=True)
    for packing in Packing:
        logprobs, gradient = gaps(learnt(compiled, packing), learnt(plain, packing))
        assert logprobs < 2e-4, packing
        assert gradient < 2e-4, packing


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("backend", ["fsdp", "archon"])
def test_bfloat16_learns_about_what_float32_does(
    ranks: Ranks, backend: str, packing: Packing, tmp_path: Path
) -> None:
    save_random(tmp_path, "qwen3")
    exact = learnt(loaded(tmp_path, ranks, backend=backend), packing)
    model = loaded(tmp_path, ranks, backend=backend, precision="bfloat16")
    logprobs, gradient = gaps(learnt(model, packing), exact)
    assert 0 < logprobs < 0.3
    assert 0 < gradient < 0.1
    assert {each.dtype for each in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("preset", [name for name, parts in PRESETS.items() if not parts.has_teacher])
def test_every_preset_makes_the_step_that_it_makes_on_a_cpu(
    device: torch.device, preset: str, tmp_path: Path
) -> None:
    """Two steps of each through the whole loop, with the published files read back from disk."""
    save_tiny_model(tmp_path / "model")
    made: list[InProcess] = []
    proxies: list[TrainingProxy] = []
    for name, ranks in (("there", Ranks(0, 1, device, None)), ("here", ALONE)):
        proxy = TrainingProxy(base_model=str(tmp_path / "model"), source=random_groups())
        configured = settings(
            tmp_path / name, algorithm={"preset": preset}, optimizer={"learning_rate": 1e-3, "eps": 1e-4}
        )
        trainer = build(proxy, configured, ranks=ranks)
        trainer.loop.resume()
        while proxy.version < 2:
            trainer.loop.step()
        trainer.leases.stop()
        made.append(trainer)
        proxies.append(proxy)
    there, here = (trainer.weights() for trainer in made)
    for name, weight in here.items():
        assert relative(there[name], weight) < 1e-4, name
    published = read_weights(Path(proxies[0].commits[-1].weights.uri))
    for name, weight in there.items():
        assert torch.equal(published[name], weight.cpu().bfloat16()), name
    for metric in ("loss", "gradient_norm", "entropy"):
        first, second = (proxy.commits[0].step.metrics[metric] for proxy in proxies)
        assert first == pytest.approx(second, rel=1e-3, abs=1e-5), metric
    configured = settings(tmp_path / "there", algorithm={"preset": preset})
    resumed = build(proxies[0], configured, ranks=Ranks(0, 1, device, None))
    resumed.loop.resume()
    resumed.leases.stop()
    for name, weight in resumed.weights().items():
        assert torch.equal(weight, there[name]), name
