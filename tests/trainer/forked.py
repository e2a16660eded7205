"""Trainer processes forked from a server that has imported the trainer's libraries, to save the seconds of
importing."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path

_IMPORTED = [
    "tests.trainer.models.archon.divided",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "trainer.__main__",
    "trainer.models.archon.dividing",
    "trainer.rotation.training",
    "trainer.train.command",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.configuration_qwen3_moe",
]


def context() -> ForkServerContext:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(_IMPORTED)
    return made


@contextmanager
def places(size: int) -> Iterator[list[dict[str, str]]]:
    """Return the environment of each rank, as under torchrun; a single rank gets none. The ranks meet at a store that
    outlives them, on a port reserved from the beginning."""
    from torch._C._distributed_c10d import TCPStore

    if size == 1:
        yield [{}]
        return

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for rank in range(size)
    ]


class ForkedTrainer:
    """`python -m trainer WORDS…`, once per environment, with the methods of Popen that tests use. Output is appended
    to `log`."""

    def __init__(self, words: Sequence[str], environments: Sequence[Mapping[str, str]], log: Path) -> None:
        self._processes = [
            context().Process(target=_train, args=(list(words), dict(each), log), daemon=True)
            for each in environments
        ]
        for process in self._processes:
            process.start()

    @property
    def pid(self) -> int:
        """Process id of the first rank."""
        found = self._processes[0].pid
        assert found is not None
        return found

    def poll(self) -> int | None:
        """Return the status of a rank that has ended, of a failed one if there is one; that of a killed rank is
        negative."""
        ended = [process.exitcode for process in self._processes if process.exitcode is not None]
        return max(ended, key=abs, default=None)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all ranks."""
        for process in self._processes:
            process.join(timeout)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired("trainer", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        for process in self._processes:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)

    def terminate(self) -> None:
        for process in self._processes:
            process.terminate()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


def _train(words: list[str], environment: dict[str, str], log: Path) -> None:
    with log.open("ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    from trainer.__main__ import main

    sys.exit(main(words))
