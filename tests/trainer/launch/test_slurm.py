"""A rank as a task of srun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.launch.slurm import NoTask, rank_environment

TASK = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "20001",
}
PROGRAM = "import sys; from trainer.launch.slurm import main; sys.exit(main(sys.argv[2:], sys.argv[1]))"


def test_the_rank_is_that_of_the_task() -> None:
    found = rank_environment({**TASK, "HOME": "/"})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "8", "1")
    assert found["MASTER_ADDR"] == "n1"


def test_outside_of_srun_it_says_what_to_do() -> None:
    with pytest.raises(NoTask, match=r"SLURM_PROCID not set.*base-rl train"):
        rank_environment({name: value for name, value in TASK.items() if name != "SLURM_PROCID"})


def test_a_clean_end_is_one_signal_to_the_trainer(tmp_path: Path) -> None:
    """Slurm sends SIGUSR1 to all processes of the step, here to the process group."""
    place = tmp_path / "received"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "tests.trainer.launch.signals_received", str(place)],
        env={**os.environ, **TASK},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (place.exists() and place.read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGUSR1)
        os.killpg(process.pid, signal.SIGUSR1)
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert place.read_text().splitlines() == ["3 of 8", "1"]
