"""kill -9 of one of two ranks: the others end, and after a restart the weights are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.training_proxy import TrainingProxy
from tests.trainer.serve_trainer import TORCHRUN, trainer_process
from tests.trainer.test_loop import random_groups
from tests.trainer.tiny import save_tiny_model

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]

STEPS = 6


def process_of(launcher: subprocess.Popen[bytes], rank: int) -> int:
    """Return the process id of a rank, found by the environment that the launcher gave it."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (found,) = [
        int(child) for child in children if f"\0RANK={rank}\0" in f"\0{Path(f'/proc/{child}/environ').read_text()}"
    ]
    return found


@contextmanager
def training(proxy: TrainingProxy, directory: Path, preset: str) -> Iterator[subprocess.Popen[bytes]]:
    options = ("--set", f"algorithm.preset={preset}", "--set", "batch.max_tokens_per_microbatch=32")
    with (
        proxy.serve() as url,
        trainer_process(url, directory / "weights", directory / "log", *options, launcher=TORCHRUN) as process,
    ):
        yield process


def until(proxy: TrainingProxy, process: subprocess.Popen[bytes], version: int) -> None:
    proxy.wait_for(lambda: len(proxy.commits) >= version or process.poll() is not None, 240)
    assert process.poll() is None


@pytest.mark.parametrize("preset", [pytest.param("grpo", marks=pytest.mark.exhaustive), "ppo"])
def test_a_killed_rank_changes_nothing(tmp_path: Path, preset: str) -> None:
    """Kill the second rank, then the first, which holds the claim; the critic is restored as well."""
    base = tmp_path / "base"
    save_tiny_model(base)
    undisturbed = TrainingProxy(base_model=str(base), source=random_groups())
    (tmp_path / "undisturbed").mkdir()
    with training(undisturbed, tmp_path / "undisturbed", preset) as process:
        until(undisturbed, process, STEPS)
        process.terminate()
        process.wait(60)

    proxy = TrainingProxy(base_model=str(base), source=random_groups())
    (tmp_path / "killed").mkdir()
    for rank, version in ((1, 2), (0, 4)):
        with training(proxy, tmp_path / "killed", preset) as process:
            until(proxy, process, version)
            os.kill(process_of(process, rank), signal.SIGKILL)
            assert process.wait(90) != 0, "the launcher ends the other one and says that it failed"
    with training(proxy, tmp_path / "killed", preset) as process:
        until(proxy, process, STEPS)
        process.terminate()
        process.wait(60)

    wanted = [commit.weights.sha256 for commit in undisturbed.commits[:STEPS]]
    assert [commit.weights.sha256 for commit in proxy.commits[:STEPS]] == wanted
    assert set(proxy.consumed.values()) == {1}
