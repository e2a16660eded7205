"""The actor's process, without Ray: its output, its end, and the end of the actor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from proxy.cli.cluster.ray.process import Ended, NodeProcess

WAITS = "import signal, sys; print('here', flush=True); signal.pause()"
ACTOR = """
import sys
from proxy.cli.cluster.ray.process import NodeProcess
actor = NodeProcess("one")
actor.start(["-c", sys.argv[1]], {}, ".")
actor.wait()
"""


def ended(directory: Path, program: str, **environment: str) -> Ended:
    process = NodeProcess("one")
    process.start(["-c", program], environment, str(directory))
    return process.wait()


def test_output_is_passed_on_and_its_end_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os, sys; print(os.getcwd()); print('x\\n' * 20); sys.exit(os.environ['STATUS'])"
    found = ended(tmp_path, program, STATUS="wrong: é")
    assert found.status == 1
    assert found.tail.splitlines()[-1] == "wrong: é"
    assert len(found.tail.splitlines()) == 15
    printed = capfd.readouterr().out
    assert str(tmp_path) in printed
    assert printed.count("x\n") == 20


def test_a_signal_is_a_status_as_in_a_shell(tmp_path: Path) -> None:
    assert ended(tmp_path, "import os; os.kill(os.getpid(), 9)").status == 128 + signal.SIGKILL


def test_a_process_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    found = ended(tmp_path / "nowhere", "")
    assert found.status == 127
    assert f"the directory {tmp_path / 'nowhere'}" in found.tail


def test_processes_that_are_left_behind_are_killed(tmp_path: Path) -> None:
    program = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {WAITS!r}]).pid)"
    found = ended(tmp_path, program)
    until_gone(next(int(line) for line in found.tail.splitlines() if line.isdigit()))


def test_the_process_dies_with_its_actor() -> None:
    actor = subprocess.Popen(
        [sys.executable, "-c", ACTOR, WAITS], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert actor.stdout is not None
        assert actor.stdout.readline() == "here\n"
        (child,) = psutil.Process(actor.pid).children()
    finally:
        os.kill(actor.pid, signal.SIGKILL)
        actor.communicate(timeout=60)
    until_gone(child.pid)


def test_the_process_dies_with_the_raylet_of_its_actor() -> None:
    """A program that starts the actor stands for the raylet."""
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]).wait()"
    raylet = subprocess.Popen(
        [sys.executable, "-c", program, ACTOR, WAITS], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert raylet.stdout is not None
        assert raylet.stdout.readline() == "here\n"
        actor, child = psutil.Process(raylet.pid).children(recursive=True)
    finally:
        raylet.kill()
        raylet.communicate(timeout=60)
    until_gone(actor.pid)
    until_gone(child.pid)


def until_gone(process: int) -> None:
    """Wait until a process has ended, even if nobody has asked for its status."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
