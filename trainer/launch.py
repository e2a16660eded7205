"""`python -m trainer.launch N ARGUMENTS…`: N processes of the trainer on this machine, ended and answered for as one.

torch's elastic launcher starts them, as torchrun does. SIGTERM and SIGINT end all of them cleanly, with exit status
0; otherwise the status is that of the first one that failed, when the others have been ended, and the last line says
which one that was and why. Where one was out of memory, all are started again (`restarts.py`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.contract.visible import visible
from trainer.runtime.restarts import STATUS, Restarts

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

STOP_SECONDS = 15
"""How long the processes may take to end after a signal; then they are killed."""


def main(arguments: Sequence[str] | None = None, module: str = "trainer") -> int:
    """`module` is what each process runs."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    count = int(words[0])
    # Together they have the machine's cores; torch would give all of them to each.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # each process has said why it ended
    from torch.distributed.elastic.multiprocessing import SignalException

    with tempfile.TemporaryDirectory(prefix="base-rl-train-") as directory:
        restarts = Restarts(Path(directory))
        restarts.tell_processes()
        try:
            while (status := _together(count, module, words[1:], restarts)) != 0 and restarts.grant():
                pass
        except SignalException:
            return 0
    return status


def _together(count: int, module: str, arguments: Sequence[str], restarts: Restarts) -> int:
    """Runs the processes to their end; the exit status. Raises torch's SignalException when they were to end."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=STOP_SECONDS,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        status, reason = _first_cause(error, restarts)
        if status != STATUS:
            sys.stderr.write(f"base-rl: {visible(reason)}\n")
        return status
    return 0


def _first_cause(error: ChildFailedError, restarts: Restarts) -> tuple[int, str]:
    """Exit status and what was first: the words of a rank that said why it ends, or else who died; of several within
    a second rather one that was killed than one that failed for it, and last those that were told to end."""
    said = restarts.said()
    if said is not None:
        return said.status, f"rank {said.rank} cannot go on: {said.reason}"
    rank, failure = min(
        error.failures.items(),
        key=lambda each: (each[1].timestamp, each[1].exitcode == -signal.SIGTERM, each[1].exitcode > 0),
    )
    if failure.exitcode > 0:
        return failure.exitcode, f"rank {rank} ended with status {failure.exitcode}, and the others with it"
    return 1, f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}, and the others ended with it"


if __name__ == "__main__":
    sys.exit(main())
