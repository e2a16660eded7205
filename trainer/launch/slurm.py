"""`python -m trainer.launch.slurm ARGUMENTS…`: one rank of the trainer, as a task of `srun`.

`base-rl launch slurm` writes the batch script that calls this. The rank, the world and the local rank come from
Slurm's variables; `MASTER_ADDR` and `MASTER_PORT` from the script. If the script names a directory for restarts that
all nodes share, a rank that ran out of memory is started again with the bound that it asked for (`restarts.py`).

The trainer runs in a process of its own, because it takes a second signal as an order to leave its claims behind, and
Slurm sends every signal to all processes of a step. SIGUSR1 asks for a clean end: it is ignored by the trainer, which
gets one SIGTERM from here instead. A SIGTERM of Slurm's reaches the trainer directly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from trainer.launch.rank import join_restarts

_VARIABLES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


class NoTask(Exception):
    """The process is no task of a job step. The message names the missing variables."""


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch.distributed's variables for the task of Slurm that has this environment. Raise NoTask."""
    missing = [name for name in (*_VARIABLES.values(), *_RENDEZVOUS) if name not in environment]
    if missing:
        raise NoTask(
            f"{', '.join(missing)} not set: this is a task of srun, in the batch script that `base-rl launch slurm`"
            " writes; to train on this machine use `base-rl train`"
        )
    tasks = {name: environment[variable] for name, variable in _VARIABLES.items()}
    return {**tasks, **{name: environment[name] for name in _RENDEZVOUS}}


def main(arguments: Sequence[str] | None = None, module: str = "trainer") -> int:
    """Run the rank to its end and return its exit status; 0 if it was ended by a signal from outside."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        variables = rank_environment(os.environ)
    except NoTask as error:
        sys.stderr.write(f"base-rl: {error}\n")
        return 2
    if (restarts := join_restarts(variables["RANK"])) is not None:
        restarts.set_environment()
    return _supervised([sys.executable, "-m", module, *words], {**os.environ, **variables})


def _supervised(command: Sequence[str], environment: Mapping[str, str]) -> int:
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if process is not None and received == [signal.SIGUSR1]:
            process.terminate()

    # What is ignored here stays ignored in the trainer: it starts before the handler is set.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, receive)
    process = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGUSR1, receive)
    status = process.wait()
    if received and status == -signal.SIGTERM:
        return 0
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
