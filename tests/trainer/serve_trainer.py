"""Real processes of `python -m trainer` that use a fake proxy's address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.fakes.training_proxy import KEY, RUN
from tests.trainer.forked import ForkedTrainer, places

MODULE = (sys.executable, "-m", "trainer")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer")


@dataclass
class Kills:
    """A hook of the fake proxy's requests that kills the process whose pid is in `victims`, once. `arrives` says of
    each kill whether the request reaches the proxy."""

    arrives: list[bool]
    victims: list[int] = field(default_factory=list)

    def __call__(self) -> None:
        if self.victims:
            os.kill(self.victims.pop(), signal.SIGKILL)
            if not self.arrives.pop(0):
                raise ConnectionAbortedError


@contextmanager
def trainer_process(
    url: str,
    weights: Path,
    log: Path,
    *options: str,
    launcher: Sequence[str],
    run: str | None = RUN,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a trainer by a command line. At the end it is killed with its children if it still runs. Its log is
    appended to `log`. If `run` is None, the options name several runs."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*launcher, *_words(url, weights, run), *options], stdout=output, stderr=output, env=_environment()
        )
        try:
            yield process
        finally:
            # A launcher's ranks have process groups of their own, and would outlive it.
            left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            process.wait()
            for child in left:
                child.kill()


@contextmanager
def forked_trainer(
    url: str, weights: Path, log: Path, *options: str, size: int = 1, run: str | None = RUN
) -> Iterator[ForkedTrainer]:
    """Start this number of ranks by fork."""
    with places(size) as environments:
        words = [*_words(url, weights, run), *options]
        forked = ForkedTrainer(words, [{**_environment(), **place} for place in environments], log)
        try:
            yield forked
        finally:
            forked.kill()
            forked.wait()


def _words(url: str, weights: Path, run: str | None) -> list[str]:
    values = {
        "threads": "1",
        "device": "cpu",
        "batch.trajectories": "8",
        "batch.at_least": "1",
        "batch.wait_seconds": "20",
        "optimizer.learning_rate": "1e-3",
        "weights.directory": str(weights),
        "mismatch.warn_above": "0",  # the sessions' log-probabilities are invented
        "mismatch.pause_above": "0",
    }
    if run is not None:
        values = {"run": run, **values}
    return ["--proxy", url, *(word for key, value in values.items() for word in ("--set", f"{key}={value}"))]


def _environment() -> dict[str, str]:
    return {**os.environ, "BASE_RL_TRAINER__API_KEY": KEY, "OMP_NUM_THREADS": "1"}
