"""A Redis of one's own, on a free port."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

_START_SECONDS = 10.0


class RedisServer:
    """A server that keeps nothing on the disk: what it held is lost when it is killed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        program = shutil.which("redis-server")
        assert program is not None, "redis-server is not installed"
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._directory)]
        self._process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
