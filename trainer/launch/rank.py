"""`python -m trainer.launch.rank ARGUMENTS…`: one rank of the trainer, in a place that a scheduler chose.

`base-rl up --ray` starts it in an actor, with torch.distributed's variables in the environment: RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT. If the environment names a directory for restarts that all nodes share, ranks
that follow one that ran out of memory use the bound that it asked for (`restarts.py`).

The trainer replaces this program in its process, so that the actor's signals reach it directly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainer.runtime.restarts import Restarts


def join_restarts(rank: str) -> Restarts | None:
    """Return the messages in the directory that the environment names, if it names one. The first rank grants what
    the ranks before asked for: the others read the bound after they have joined it."""
    if (restarts := Restarts.of_launcher()) is not None:
        restarts.make_directory()
        if rank == "0":
            restarts.begin_again()
    return restarts


def main(arguments: Sequence[str] | None = None, module: str = "trainer") -> None:
    """Replace this process with the rank. `module` is the module that it runs."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    join_restarts(os.environ["RANK"])
    os.execv(sys.executable, [sys.executable, "-m", module, *words])  # noqa: S606  (there is no shell to start)


if __name__ == "__main__":
    main()
