"""Processes on gloo that run a function together.

Each time new ones, which a server forks that has imported everything: groups of processes have threads that are never
given back, and imports are what takes the time.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from trainer.parallel.mesh import join

_IMPORTED = [
    "tests.trainer.models.archon.divided",
    "trainer.models.archon.dividing",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.configuration_qwen3_moe",
]


def together(size: int, function: Callable[..., Any], *arguments: Any, patience_s: float = 300) -> Any:
    """Calls a module's function with the ranks and the arguments in `size` processes; what the first one returns.

    Raises AssertionError with what one of them raised, or if they take too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    members = []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(rank, size, port, there, function, arguments), daemon=True)
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
    rank: int, size: int, port: int, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    try:
        ranks = join("cpu")
        outcome: tuple[Any, str | None] = (function(ranks, *arguments), None)
    except BaseException:  # noqa: BLE001 - told to the test
        outcome = (None, traceback.format_exc())
    # Not by `send`, which would share tensors' memory with a process that ends here.
    pipe.send_bytes(pickle.dumps(outcome))
