"""The environment of an example whose agent needs packages that base-rl does not."""

from __future__ import annotations

import fcntl
import hashlib
import site
import subprocess
import sys
import venv
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_READY = "ready"
_INSTALL_SECONDS = 900


class NotInstalled(Exception):
    """The packages could not be installed. The message has pip's."""


def interpreter_for(folder: Path) -> str:
    """Return the Python that runs an example's agent.

    That is this process's own unless the example has a `requirements.txt`. Then it is the Python of an environment in
    `.venv/examples/NAME`, which has these packages beside those of this environment. It is made if it does not exist
    or if the pins have changed (half a minute). Raise NotInstalled if that fails.
    """
    requirements = folder / "requirements.txt"
    if not requirements.exists():
        return sys.executable
    root = Path(sys.prefix) / "examples" / folder.name
    root.parent.mkdir(exist_ok=True)
    fingerprint = hashlib.sha256(requirements.read_bytes() + CONSTRAINTS.read_bytes()).hexdigest()
    # Tests and a run may need the environment at the same time; only one process may make it.
    with (root.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = root / _READY
        if not ready.exists() or ready.read_text() != fingerprint:
            print(f"installing {requirements} in {root} …", flush=True)
            _install(root, requirements)
            ready.write_text(fingerprint)
    return str(root / "bin" / "python")


def _install(root: Path, requirements: Path) -> None:
    venv.create(root, clear=True, symlinks=True, with_pip=False)
    (packages,) = root.glob("lib/python*/site-packages")
    # `addsitedir`, unlike a bare path, also reads the .pth files there, by which base-rl itself is installed.
    lines = [f"import site; site.addsitedir({place!r})" for place in site.getsitepackages()]
    (packages / "base.pth").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(root / "bin" / "python"), "install", "--quiet"]
    command += ["--disable-pip-version-check", "-r", str(requirements), "-c", str(CONSTRAINTS)]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    if installed.returncode:
        raise NotInstalled(f"{' '.join(command)}\n{installed.stderr.strip()[-2000:]}")
