"""Runs the parts of base-rl as processes: starts them, restarts a part that dies, and ends all of them in order.

Every part has a process group of its own, so that Ctrl-C in the terminal reaches only the supervisor, which then
ends the parts in order. On Linux, the kernel ends the parts if the supervisor itself is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from proxy.private_files import make_directory, open_file

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 15.0
_RAPID_DEATHS = 5
_RAPID_WINDOW_S = 60.0
_TAIL_LINES = 15
# Characters shown of the beginning and the end of a long line: a traceback in JSON has its reason at the end.
_TAIL_LINE_ENDS = (160, 480)
_PR_SET_PDEATHSIG = 1

WRONG_CONFIGURATION = 2
"""Exit status of a part that a restart does not help; the last line of its log has the reason."""

AWAY = 75
"""Exit status of a part that cannot start because something it needs is unavailable (EX_TEMPFAIL of sysexits.h); the
last line of its log names that."""

Listener = Callable[[str, str], None]


# All supervisors of this process, for `kill_all`.
_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()


class PartFailed(Exception):
    """A part died repeatedly, its configuration is wrong, or what it needs was unavailable at its first start. The
    message includes the end of its log."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process that the supervisor runs. `env` is laid over the supervisor's own environment."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    stop_seconds: float = 10.0
    """Seconds from SIGTERM until the part is killed."""


class _Running:
    def __init__(self, part: Part, log: Path) -> None:
        self.part = part
        self.log = log
        self.process: asyncio.subprocess.Process | None = None
        self.restarts = 0
        self.deaths: deque[float] = deque(maxlen=_RAPID_DEATHS)


class Supervisor:
    """Runs parts. It calls `listener(part, event)` at starts, deaths and restarts; logs go to `log_dir/PART.log`."""

    def __init__(self, parts: list[Part], log_dir: Path, listener: Listener, *, together: bool = False) -> None:
        """With `together`, the parts end at the same time: each may take its whole `stop_seconds`."""
        make_directory(log_dir)
        self._running = [_Running(part, log_dir / f"{part.name}.log") for part in parts]
        self._listener = listener
        self._together = together
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        _supervisors.add(self)

    async def __aenter__(self) -> Supervisor:
        for running in self._running:
            await self._spawn(running)
            self._keepers.append(asyncio.create_task(self._keep(running), name=f"keep-{running.part.name}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(running.part.name for running in self._running)

    def restarts(self, name: str) -> int:
        return self._find(name).restarts

    def alive(self, name: str) -> bool:
        process = self._find(name).process
        return process is not None and process.returncode is None

    def pid(self, name: str) -> int | None:
        process = self._find(name).process
        return process.pid if process is not None else None

    def log(self, name: str) -> Path:
        return self._find(name).log

    def log_tail(self, name: str, lines: int = _TAIL_LINES) -> str:
        try:
            text = self._find(name).log.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(_shortened(line) for line in text.splitlines()[-lines:])

    def raise_for_failure(self) -> None:
        """Raise PartFailed if a part failed for good."""
        for keeper in self._keepers:
            if keeper.done() and not keeper.cancelled() and (error := keeper.exception()) is not None:
                raise error

    async def wait_for_failure(self) -> None:
        """Wait until a part has failed for good, and raise PartFailed."""
        done, _ = await asyncio.wait(self._keepers, return_when=asyncio.FIRST_EXCEPTION)
        for keeper in done:
            keeper.result()

    def kill(self) -> None:
        """Send SIGKILL to every part and its child processes, without waiting."""
        for running in self._running:
            process = running.process
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the parts, last started first or together: SIGTERM, then SIGKILL for those that exceed their
        `stop_seconds`."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        for keeper in self._keepers:
            with contextlib.suppress(asyncio.CancelledError, PartFailed):
                await keeper
        if self._together:
            await asyncio.gather(*(_end(running) for running in self._running))
            return
        for running in reversed(self._running):
            await _end(running)

    def _find(self, name: str) -> _Running:
        return next(running for running in self._running if running.part.name == name)

    async def _spawn(self, running: _Running) -> None:
        part = running.part
        with open_file(running.log, "ab") as log:
            running.process = await asyncio.create_subprocess_exec(
                *part.argv,
                env={**os.environ, **part.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self._listener(part.name, f"started (pid {running.process.pid})")

    async def _keep(self, running: _Running) -> None:
        """Restart the part after each death, with growing pauses.

        If something that the part needs is unavailable, its first start fails, because the user waits for a result.
        Later starts are repeated until it is available again.
        """
        waits = 0
        while True:
            process = running.process
            assert process is not None
            code = await process.wait()
            reason = self.log_tail(running.part.name, 1).removeprefix("base-rl: ")
            if code == WRONG_CONFIGURATION or (code == AWAY and running.restarts == 0):
                raise PartFailed(f"{reason} (reported by {running.part.name}; see {running.log})")
            if code == AWAY:
                pause = min(_FIRST_BACKOFF_S * 2**waits, _LONGEST_BACKOFF_S)
                waits += 1
                await self._restart(running, f"{reason}; trying again in {pause:.1f} s", pause)
                continue
            waits = 0
            running.deaths.append(time.monotonic())
            rapid = [death for death in running.deaths if death > time.monotonic() - _RAPID_WINDOW_S]
            if len(rapid) >= _RAPID_DEATHS:
                raise PartFailed(
                    f"{running.part.name} died {_RAPID_DEATHS} times within {_RAPID_WINDOW_S:.0f} s "
                    f"(last: {_describe_exit(code)}). The end of {running.log}:\n{self.log_tail(running.part.name)}"
                )
            pause = min(_FIRST_BACKOFF_S * 2 ** (len(rapid) - 1), _LONGEST_BACKOFF_S)
            await self._restart(running, f"{_describe_exit(code)}; restarting in {pause:.1f} s", pause)

    async def _restart(self, running: _Running, why: str, pause: float) -> None:
        self._listener(running.part.name, why)
        await asyncio.sleep(pause)
        running.restarts += 1
        await self._spawn(running)


async def _end(running: _Running) -> None:
    process = running.process
    if process is None or process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(running.part.stop_seconds):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # processes that the part started and left behind


def kill_all() -> None:
    """Send SIGKILL to the parts of every supervisor of this process."""
    for supervisor in list(_supervisors):
        supervisor.kill()


def _shortened(line: str) -> str:
    head, tail = _TAIL_LINE_ENDS
    return line if len(line) <= head + tail else f"{line[:head]} … {line[-tail:]}"


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> Callable[[], None] | None:
    """Return a function for the child, between fork and exec, by which the kernel kills it when its parent dies."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:
            os.kill(os.getpid(), by)

    return ask
