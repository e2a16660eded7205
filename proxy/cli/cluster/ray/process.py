"""The actor that runs one program of base-rl on a node of a Ray cluster.

It starts a process, passes its output on to its own, which Ray keeps as the actor's log, and reports how it ended.
Nothing else passes through it: engines and trainer talk to the proxy themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

import msgspec

from proxy.cli.addresses import random_free_port
from proxy.cli.supervisor import die_with_parent

_TAIL_LINES = 15
_NOT_STARTED = 127  # as a shell reports a program that it cannot start
# The output's end follows that of the process at once, unless a process of another group holds it open.
_OUTPUT_SECONDS = 2.0
_RAYLET_POLL_S = 1.0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The node of an actor, and a port that is free on it."""

    address: str
    port: int


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended. `status` is that of a shell, `tail` the last lines of output."""

    status: int
    tail: str


class NodeProcess:
    """Runs one process at most, which dies with the actor, and with the raylet that started the actor: Ray leaves an
    actor alone whose raylet is gone, while the driver places another one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ended = threading.Event()
        self._raylet = os.getppid()
        self._status = _NOT_STARTED

    def __repr__(self) -> str:
        """Return the name, which Ray writes before the lines of the actor's log in a driver's terminal."""
        return self._name

    def find_place(self) -> Place:
        import ray

        address = ray.util.get_node_ip_address()
        return Place(address=address, port=random_free_port(address))

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
        """Start Python with these arguments in a directory, with `environment` over the variables of the node."""
        # The kernel kills the process when the thread that started it ends, and Ray's threads are not ours.
        threading.Thread(
            target=self._run,
            args=([sys.executable, *arguments], {**os.environ, **environment}, directory),
            name=self._name,
            daemon=True,
        ).start()

    def wait(self) -> Ended:
        """Wait for the end of the process, and return how it ended."""
        self._ended.wait()
        return Ended(status=self._status, tail="\n".join(self._tail))

    def end(self) -> None:
        """Ask the process to end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def _run(self, command: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
        try:
            process = self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # SIGKILL: the next actor of this name may be running already, so there is no time for an orderly end.
                preexec_fn=die_with_parent(by=signal.SIGKILL),  # noqa: PLW1509  (calls prctl alone)
            )
        except OSError as error:
            self._tail.append(
                f"cannot be started on this node ({error}): it needs base-rl, and the directory {directory} of the"
                " command"
            )
            self._ended.set()
            return
        assert process.stdout is not None
        reader = threading.Thread(target=self._pass_on, args=(process.stdout,), daemon=True)
        reader.start()
        status = self._wait_with_raylet(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that it left behind
        reader.join(_OUTPUT_SECONDS)
        self._status = status if status >= 0 else 128 - status
        self._ended.set()

    def _wait_with_raylet(self, process: subprocess.Popen[bytes]) -> int:
        while True:
            try:
                return process.wait(_RAYLET_POLL_S)
            except subprocess.TimeoutExpired:
                if os.getppid() != self._raylet:
                    os._exit(1)  # the kernel kills the process

    def _pass_on(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                text = line.decode(errors="replace").rstrip("\n")
                self._tail.append(text)
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()
