"""`python -m trainer.launch N ARGUMENTS…`: N processes of the trainer on this machine, ended and answered for as one.

torch's elastic launcher starts them, as torchrun does. SIGTERM and SIGINT end all of them cleanly, with exit status
0; otherwise the status is that of the first one that failed, when the others have been ended.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

STOP_SECONDS = 15
"""How long the processes may take to end after a signal; then they are killed."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    count = int(words[0])
    # Together they have the machine's cores; torch would give all of them to each.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # each process has said why it ended
    from torch.distributed.elastic.multiprocessing import SignalException
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
        elastic_launch(config, sys.executable)("-m", "trainer", *words[1:])
    except SignalException:
        return 0
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
