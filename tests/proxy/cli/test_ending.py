"""Ctrl-C on a real `base-rl up` ends it within two seconds, with every call in progress recorded."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest

from proxy.cli.local_keys import load
from proxy.cli.stack import read_address

READY_SECONDS = 90.0
MOST_SECONDS = 2.0
BUSY_MACHINE = 2.0
"""Additional seconds for a machine whose cores are shared by several test processes. Ending with calls in progress
once took seven seconds, and with a trainer that imports torch five. A machine that takes longer to start all may take
as long to end."""
SLOW = '[[rule]]\ntext = "one two three four five six seven eight nine ten eleven twelve"\nms_per_token = 3000\n'


class Up:
    """A `base-rl up` with the scripted engine, whose answers take half a minute."""

    def __init__(self, folder: Path) -> None:
        (folder / "slow.toml").write_text(SLOW)
        self.data_dir = folder / "data"
        self.log = (folder / "up.log").open("w")
        options = ["--engine", "scripted", "--script", "slow.toml", "--port", "0", "--data-dir", "data"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "proxy.cli", "up", *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
        )
        began = time.monotonic()
        self.wait_for("Ctrl-C ends it")
        self.patience = max(BUSY_MACHINE, time.monotonic() - began)
        address, keys = read_address(self.data_dir), load(self.data_dir)
        assert address is not None
        assert keys is not None
        self.url, self.keys = address.url, keys

    def wait_for(self, words: str) -> None:
        """Wait until it has printed these words."""
        until = time.monotonic() + READY_SECONDS
        while words not in Path(self.log.name).read_text():
            assert self.process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)

    def seconds_to_end(self, number: signal.Signals) -> float:
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(90)
        return time.monotonic() - began

    def turns(self) -> list[tuple[str, int]]:
        """Return the state of each recorded turn, and how many bytes of output tokens it has."""
        with closing(sqlite3.connect(self.data_dir / "base-rl.sqlite3")) as connection:
            return list(connection.execute("SELECT state, length(output_ids) FROM turns"))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    found = Up(tmp_path)
    yield found
    found.process.kill()
    found.process.wait(60)
    found.log.close()


class Reader(Thread):
    """Reads a streamed answer to its end; `began` is set by its first line."""

    def __init__(self, url: str, key: str, method: str = "GET", body: object = None) -> None:
        super().__init__(daemon=True)
        self._request = (method, url, {"authorization": f"Bearer {key}"}, body)
        self.began = Event()
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        method, url, headers, body = self._request
        try:
            with httpx.stream(method, url, headers=headers, json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    self.lines.append(line)
                    if "content" in line or "snapshot" in line:
                        self.began.set()
        except httpx.HTTPError as error:
            self.lines.append(f"broken: {error!r}")


def ask(up: Up) -> Reader:
    body = {"model": "policy", "messages": [{"role": "user", "content": "count"}], "stream": True}
    return Reader(f"{up.url}/v1/chat/completions", up.keys.run_key, "POST", body)


def test_ctrl_c_ends_open_streams_and_records_the_call_that_it_cuts(up: Up) -> None:
    events = Reader(f"{up.url}/api/v1/runs/policy/events", up.keys.admin_key)
    call = ask(up)
    assert call.began.wait(90)
    assert events.began.wait(90)
    seconds = up.seconds_to_end(signal.SIGINT)
    assert up.process.returncode == 130
    assert seconds < MOST_SECONDS + up.patience
    ((state, size),) = up.turns()
    assert state == "truncated"
    assert size > 0
    call.join(60)
    assert not [line for line in call.lines if line.startswith("broken")]
    assert not any('"finish_reason":"stop"' in line for line in call.lines)
    for part in ("engine", "proxy"):
        assert "Traceback" not in (up.data_dir / "logs" / f"{part}.log").read_text()


def test_a_second_ctrl_c_ends_everything_at_once(up: Up) -> None:
    call = ask(up)
    assert call.began.wait(90)
    children = [
        int(pid) for pid in subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(up.process.pid)]).split()
    ]
    assert len(children) >= 2
    up.process.send_signal(signal.SIGINT)
    up.wait_for("ending: proxy, engine")
    assert up.seconds_to_end(signal.SIGINT) < up.patience
    assert up.process.returncode == 130
    until = time.monotonic() + 10
    while any(_runs(pid) for pid in children):
        assert time.monotonic() < until
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Return whether the process runs; a process that ended but was not waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
