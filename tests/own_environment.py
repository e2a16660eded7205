"""Virtual environments beside that of development, for suites whose packages are large or exclude its own."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_INSTALL_SECONDS = 900

Install = Callable[..., None]
"""Runs `pip install` in the environment with these arguments."""


def own_environment(suite: str, contents: str, fill: Callable[[Path, Install], None]) -> Path:
    """Return the folder of a suite's environment, made on first use in the user's cache (a minute or more).

    `fill` gets the folder and installs the packages. `contents` describes them: another text, or another Python,
    makes another environment.
    """
    digest = hashlib.sha256(f"{contents}\n{sys.version}".encode()).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "base-rl" / suite / digest
    root.mkdir(parents=True, exist_ok=True)
    venv = root / "venv"

    def install(*arguments: str) -> None:
        _run([str(venv / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *arguments])

    with (root / ".lock").open("w") as lock:
        # Two test processes must not install into it at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / ".ready").is_file():
            _run([sys.executable, "-m", "venv", str(venv)])
            fill(venv, install)
            (root / ".ready").touch()
    return venv


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
