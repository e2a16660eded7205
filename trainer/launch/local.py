"""`python -m trainer.launch N ARGUMENTS…` runs N processes of the trainer on this machine as one.

torch's elastic launcher starts them, as torchrun does. SIGTERM and SIGINT end all of them cleanly, with exit status
0. Otherwise the exit status is that of the first process that failed, after the others have been ended, and the last
line names that process and the reason. If one ran out of memory, all are started again (`restarts.py`).
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
"""Seconds that the processes have to end after a signal; then they are killed."""


def main(arguments: Sequence[str] | None = None, module: str = "trainer") -> int:
    """Run the processes and return their common exit status. `module` is the module that each process runs."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    count = int(words[0])
    # The processes share the machine's cores; by default torch would use all cores in each.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.getLogger("torch.distributed.elastic").setLevel(
        logging.CRITICAL
    )  # each process has already logged why it ended
    from torch.distributed.elastic.multiprocessing import SignalException

    with tempfile.TemporaryDirectory(prefix="base-rl-train-") as directory:
        restarts = Restarts(Path(directory))
        restarts.set_environment()
        try:
            while (status := _together(count, module, words[1:], restarts)) != 0 and restarts.grant_request():
                pass
        except SignalException:
            return 0
    return status


def _together(count: int, module: str, arguments: Sequence[str], restarts: Restarts) -> int:
    """Run the processes to their end and return the exit status. Raises torch's SignalException after a signal."""
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
        status, reason = first_cause(error, restarts)
        if status != STATUS:
            sys.stderr.write(f"base-rl: {visible(reason)}\n")
        return status
    return 0


def first_cause(error: ChildFailedError, restarts: Restarts) -> tuple[int, str]:
    """Return the exit status and the cause: the report of a rank that said why it ended, or else the first process
    that died. Of several that died within a second, a killed one counts before one that failed as a consequence, and
    processes that were asked to end count last."""
    report = restarts.first_report()
    if report is not None:
        return report.status, f"rank {report.rank} cannot go on: {report.reason}"
    rank, failure = min(
        error.failures.items(),
        key=lambda each: (each[1].timestamp, each[1].exitcode == -signal.SIGTERM, each[1].exitcode > 0),
    )
    if failure.exitcode > 0:
        return failure.exitcode, f"rank {rank} ended with status {failure.exitcode}, and the others with it"
    return 1, f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}, and the others ended with it"


if __name__ == "__main__":
    sys.exit(main())
