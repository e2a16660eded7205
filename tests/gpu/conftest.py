"""The device of `make test-gpu`: CUDA, or none, in which case tests are skipped. BASE_RL_GPU_SUITE_DEVICE=cuda makes
them fail instead; =cpu runs the same tests on a CPU, with tiny shapes and a stand-in for flex_attention's kernel."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.dense_kernel import as_on_cuda
from trainer.parallel.mesh import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore warnings of compilers about themselves."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    asked = os.environ.get("BASE_RL_GPU_SUITE_DEVICE", "")
    if asked not in {"", "cuda", "cpu"}:
        pytest.fail(f"BASE_RL_GPU_SUITE_DEVICE={asked}: cuda or cpu")
    if asked == "cpu":
        torch.set_flush_denormal(True)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        message = "torch finds no CUDA device"
        pytest.fail(message) if asked else pytest.skip(message)
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture
def ranks(device: torch.device) -> Ranks:
    return Ranks(0, 1, device, None)


@pytest.fixture(autouse=True)
def _kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        as_on_cuda(monkeypatch)


@pytest.fixture(autouse=True)
def _clean(device: torch.device) -> Iterator[None]:
    yield
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
