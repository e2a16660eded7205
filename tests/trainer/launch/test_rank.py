"""A rank that an actor starts: the trainer takes its process, and finds the bound of the ranks before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trainer.runtime.restarts import DIRECTORY_VARIABLE, EndReport, Restarts, SmallerBound

PROGRAM = "import sys; from trainer.launch.rank import main; main(sys.argv[2:], sys.argv[1])"
BOUND = SmallerBound(run="shop", version=3, max_tokens_per_microbatch=64)


def run_rank(rank: int, directory: Path | None = None) -> tuple[int, str]:
    """Run a rank to its end; return its process id and its output."""
    variables = {} if directory is None else {DIRECTORY_VARIABLE: str(directory)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "tests.trainer.launch.words_and_pid", "one", "two"],
        env={**os.environ, **variables, "RANK": str(rank)},
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return process.pid, output


def test_the_trainer_takes_the_process_with_its_arguments() -> None:
    pid, output = run_rank(0)
    assert output == f"{pid} one two\n", "a signal to this process reaches the trainer"


def test_the_first_rank_grants_the_bound_that_was_asked_for(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path)
    restarts.request(BOUND)
    restarts.report(EndReport(rank=1, status=75, reason="out of memory"))
    run_rank(1, tmp_path)
    assert restarts.granted_bound("shop") is None
    run_rank(0, tmp_path)
    assert restarts.granted_bound("shop") == BOUND
    assert restarts.first_report() is None, "the ranks that follow have not ended"


def test_the_directory_is_made(tmp_path: Path) -> None:
    run_rank(0, tmp_path / "new" / "directory")
    assert (tmp_path / "new" / "directory").is_dir()
