"""How much memory is used, and what happens if it is not available."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from proxy.contract.trajectory import TrajectoryGroup
from tests.fakes.training_proxy import TrainingProxy
from tests.gpu.device import peak_bytes, relative
from tests.trainer.runtime.test_memory import refuse
from tests.trainer.tiny import InProcess, build, group_of, save_tiny_model, settings, trajectory, turn
from trainer.algorithm.logprobs import token_logprobs
from trainer.config import TrainerSettings
from trainer.parallel.mesh import Ranks

pytestmark = pytest.mark.gpu


def test_log_probabilities_take_the_memory_of_a_chunk(device: torch.device) -> None:
    hidden, chunk = 64, 1 << 24

    def peak(vocabulary: int, tokens: int, limit: int = chunk) -> int | None:
        head = nn.Linear(hidden, vocabulary, bias=False, device=device)
        hidden_ND = torch.randn(tokens, hidden, device=device, requires_grad=True)
        targets_N = torch.randint(0, vocabulary, (tokens,), device=device)
        head.weight.grad = torch.zeros_like(head.weight)

        def step() -> None:
            logprobs_N, _ = token_logprobs(
                head, hidden_ND, targets_N, torch.ones(tokens, device=device), vocabulary, limit
            )
            torch.autograd.backward(logprobs_N.sum())

        step()  # memory that the libraries use for themselves
        return peak_bytes(device, step)

    if device.type == "cpu":
        peak(4096, 64)
        return
    peaks = [peak(vocabulary, tokens) or 0 for vocabulary in (32_768, 151_936) for tokens in (4_096, 32_768)]
    assert max(peaks) < 1.4 * min(peaks)
    assert max(peaks) < 6 * 4 * chunk
    assert (peak(32_768, 32_768, limit=32_768 * 32_768) or 0) > 8 * max(peaks), "the counting counts"


def long_groups(length: int) -> Callable[[int], TrajectoryGroup]:
    def source(version: int) -> TrajectoryGroup:
        generator = torch.Generator().manual_seed(version)
        members = []
        for number in range(16):
            prompt, output = (torch.randint(0, 64, (count,), generator=generator).tolist() for count in (8, length))
            members.append(trajectory(turn(output, prompt=prompt, version=version), reward=float(number % 2)))
        return group_of(members)

    return source


@pytest.fixture
def no_limit(device: torch.device) -> Iterator[None]:
    yield
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.usefixtures("no_limit")
def test_a_step_that_does_not_fit_is_made_in_smaller_parts(ranks: Ranks, tmp_path: Path) -> None:
    """The process really runs out of memory: it may use 60 % of what the step needed."""
    device, length = ranks.device, 1000 if ranks.device.type == "cuda" else 30
    save_tiny_model(tmp_path / "model")

    def started(name: str) -> tuple[InProcess, TrainingProxy]:
        proxy = TrainingProxy(base_model=str(tmp_path / "model"), source=long_groups(length))
        configured: TrainerSettings = settings(tmp_path / name, optimizer={"learning_rate": 1e-3, "eps": 1e-4})
        trainer = build(proxy, configured, ranks=ranks)
        trainer.loop.resume()
        return trainer, proxy

    roomy, proxy = started("roomy")
    seen = refuse(roomy, 10**9)
    peak = peak_bytes(device, roomy.loop.step)
    assert proxy.commits[0].step.metrics["oom_splits"] == 0
    wanted = roomy.weights()
    roomy.leases.stop()
    del roomy

    tight, proxy = started("tight")
    if peak is None:
        refuse(tight, max(seen) * 3 // 5)
    else:
        torch.cuda.empty_cache()
        bound = torch.cuda.memory_reserved(device) + int(0.6 * peak)
        torch.cuda.set_per_process_memory_fraction(bound / torch.cuda.mem_get_info(device)[1], device)
    while not proxy.commits:
        tight.loop.step()
    tight.leases.stop()
    assert proxy.commits[0].step.metrics["oom_splits"] >= 1
    for name, weight in tight.weights().items():
        assert relative(weight, wanted[name]) < 1e-5, name
