"""Run a program in a process of its own, behind bubblewrap where that works, and end everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class Stopped(Exception):
    """The program was killed. The message has the reason: it took too long, or it printed too much."""


async def run(words: Sequence[str], given: str = "", *, seconds: float, longest_output: int) -> tuple[str, int]:
    """Run a program without environment variables. Return what it printed and its exit status.

    The program reads `given` on standard input. Raise Stopped after `seconds`, or if it printed more than
    `longest_output` bytes. All processes that it started are killed in any case.
    """
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,  # so that all it started can be killed
    )
    try:
        async with asyncio.timeout(seconds):
            output = await _talk(process, given.encode(errors="replace"), longest_output)
            status = await process.wait()
    except TimeoutError:
        raise Stopped("the program took too long") from None
    finally:
        _kill(process)
        await process.wait()
    if len(output) > longest_output:
        raise Stopped("the program printed too much")
    return output.decode(errors="replace").strip(), status


async def _talk(process: asyncio.subprocess.Process, given: bytes, longest: int) -> bytes:
    """Give the process its input, and return what it prints, up to one byte more than is allowed."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have ended already
        process.stdin.write(given)
        await process.stdin.drain()
    process.stdin.close()
    output = b""
    while chunk := await process.stdout.read(longest + 1):
        output = (output + chunk)[: longest + 1]
        if len(output) > longest:
            _kill(process)  # and read on to the end, without which asyncio waits for ever
    return output


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@functools.cache
def wall() -> tuple[str, ...]:
    """Return the words that put a process behind bubblewrap, none where that does not work.

    Behind it, a process has no network, sees no other processes, and sees no files but the system's, read-only.
    """
    program = shutil.which("bwrap")
    if program is None:
        return ()
    kept = sorted({"/usr", "/lib", "/lib64", "/bin", sys.base_prefix, sys.prefix, str(Path(sys.executable).parent)})
    binds = [word for place in kept if Path(place).exists() for word in ("--ro-bind", place, place)]
    words = (program, "--unshare-all", "--die-with-parent", "--new-session", "--dev", "/dev", *binds)
    probe = [*words, sys.executable, "-I", "-S", "-c", "pass"]
    works = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return words if works else ()
