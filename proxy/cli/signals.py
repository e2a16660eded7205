"""Ctrl-C and SIGTERM for commands that run processes: the first ends them in order, the second kills them."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from proxy.cli.supervisor import kill_all

# The signals of this process, in order: the first one decides its exit status.
_received: list[signal.Signals] = []


def end_on_signals(*, same_within: float = 0.0) -> None:
    """Let SIGINT and SIGTERM cancel the current task, so that every block cleans up; a second signal kills the parts
    and ends this process without waiting for anything.

    Signals within `same_within` seconds of the first one are the same wish: a scheduler that cancels a job signals
    all of its processes, and its batch script passes the signal on as well.
    """
    first_at = 0.0
    task = asyncio.current_task()
    assert task is not None
    _received.clear()

    def receive(number: signal.Signals) -> None:
        nonlocal first_at
        if _received and time.monotonic() - first_at < same_within:
            return
        _received.append(number)
        if len(_received) == 1:
            first_at = time.monotonic()
            task.cancel()
            return
        kill_all()
        os._exit(exit_status())

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell without job control starts background commands with SIGINT ignored, which must remain so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, receive, number)


def exit_status() -> int:
    """Return the exit status that shells give to the first signal received; without a signal, SIGTERM's."""
    return 128 + (_received[0] if _received else signal.SIGTERM)
