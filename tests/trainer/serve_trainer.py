"""Starts `python -m trainer` as a real process against a fake proxy's address."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.training_proxy import KEY, RUN

MODULE = (sys.executable, "-m", "trainer")


@contextmanager
def trainer_process(
    url: str, weights: Path, log: Path, *options: str, launcher: Sequence[str] = MODULE
) -> Iterator[subprocess.Popen[bytes]]:
    """The process; killed at the end if it still runs. Its log is appended to `log`."""
    values = {
        "threads": "1",
        "device": "cpu",
        "batch.trajectories": "8",
        "batch.at_least": "1",
        "batch.wait_seconds": "20",
        "optimizer.learning_rate": "1e-3",
        "weights.directory": str(weights),
    }
    command = [*launcher, "--proxy", url, "--set", f"run={RUN}"]
    for key, value in values.items():
        command += ["--set", f"{key}={value}"]
    environment = {**os.environ, "BASE_RL_TRAINER__API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen([*command, *options], stdout=output, stderr=output, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
