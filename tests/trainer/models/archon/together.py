"""Processes on gloo that run a function together.

Each time new ones, as groups of processes have threads that are never given back.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.trainer.forked import context, places
from trainer.parallel.mesh import join


def together(
    size: int, function: Callable[..., Any], *arguments: Any, patience_s: float = 300, leaving: bool = False
) -> Any:
    """Calls a module's function with the ranks and the arguments in `size` processes; what the first one returns.
    With `leaving` each ends when it is done, which the others notice; else when all are.

    Raises AssertionError with what one of them raised, or if they take too long.
    """
    with places(size) as environments:
        members = []
        for environment in environments:
            here, there = context().Pipe()
            process = context().Process(
                target=_run, args=(environment, there, patience_s, leaving, function, arguments), daemon=True
            )
            process.start()
            there.close()
            members.append((process, here))
        try:
            return _result({pipe: rank for rank, (_, pipe) in enumerate(members)}, patience_s)
        finally:
            for process, pipe in members:
                pipe.close()
                process.kill()
                process.join()


def _result(waiting: dict[Any, int], patience_s: float) -> Any:
    end, result = time.monotonic() + patience_s, None
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} did not return"
        for pipe in [each for each in waiting if each in ready]:
            rank = waiting.pop(pipe)
            try:
                value, failure = pickle.loads(pipe.recv_bytes())
            except EOFError:
                value, failure = None, "it ended"
            assert failure is None, f"rank {rank}: {failure}"
            result = value if rank == 0 else result
    return result


def _run(
    environment: dict[str, str],
    pipe: Connection,
    patience_s: float,
    leaving: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        ranks = join("cpu")
        outcome: tuple[Any, str | None] = (function(ranks, *arguments), None)
    except BaseException:  # noqa: BLE001 - told to the test
        outcome = (None, traceback.format_exc())
    # Not by `send`, which would share tensors' memory with a process that ends here.
    pipe.send_bytes(pickle.dumps(outcome))
    # No process leaves before all have reported: others may still be joining the groups that this one has joined.
    if not leaving:
        pipe.poll(patience_s)
