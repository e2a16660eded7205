"""An environment for every client, created on first use and kept, because clients' requirements exclude each other.

A Python client has a virtual environment, a Node one a folder with `node_modules`; everything that a page installs
goes there. Versions are those of `tests/clients/constraints/NAME.txt` (pip) and of the page itself (npm).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.clients.pages import Page

CONSTRAINTS = Path(__file__).parent / "constraints"
_INSTALL_SECONDS = 900
_READY = ".ready"


@dataclass(frozen=True, kw_only=True)
class ClientEnvironment:
    """A client's environment. `root` contains `bin` (Python), or `node_modules` and `bin` (Node)."""

    root: Path

    def variables(self, home: Path) -> dict[str, str]:
        """Return the variables for a command of the client: a home directory of its own, and none of this process's
        variables."""
        kept = {
            name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE") if name in os.environ
        }
        return {
            **kept,
            "HOME": str(home),
            "PATH": os.pathsep.join([*self._bin(), os.environ["PATH"]]),
            "VIRTUAL_ENV": str(self.root / "venv"),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }

    def _bin(self) -> list[str]:
        return [str(self.root / part) for part in ("venv/bin", "node_modules/.bin", "bin")]

    def new_folder(self) -> Path:
        """Return an empty folder inside the environment, where Node finds its modules."""
        folder = self.root / "runs" / str(os.getpid())
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


def environment_of(page: Page) -> ClientEnvironment:
    """Return the page's environment, and install it if it does not exist yet (minutes)."""
    constraint = CONSTRAINTS / f"{page.name}.txt"
    pinned = constraint.read_text() if constraint.is_file() else ""
    digest = hashlib.sha256(f"{page.install}\n{pinned}\n{sys.version}".encode()).hexdigest()[:12]
    root = _cache() / f"{page.name}-{digest}"
    environment = ClientEnvironment(root=root)
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root):
        if not (root / _READY).is_file():
            _install(page, environment, constraint if pinned else None)
            (root / _READY).touch()
    return environment


def _install(page: Page, environment: ClientEnvironment, constraint: Path | None) -> None:
    root = environment.root
    subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True, timeout=_INSTALL_SECONDS)
    (root / "package.json").write_text('{"private": true, "type": "module"}\n')
    variables = {
        **os.environ,
        "PATH": environment.variables(root)["PATH"],
        "VIRTUAL_ENV": str(root / "venv"),
        "NPM_CONFIG_PREFIX": str(root),
        "NPM_CONFIG_FUND": "false",
        "NPM_CONFIG_AUDIT": "false",
        "NPM_CONFIG_UPDATE_NOTIFIER": "false",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_QUIET": "1",
    }
    if constraint is not None:
        variables["PIP_CONSTRAINT"] = str(constraint)
    installed = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", page.install],
        cwd=root,
        env=variables,
        capture_output=True,
        text=True,
        timeout=_INSTALL_SECONDS,
        check=False,
    )
    if installed.returncode:
        raise RuntimeError(
            f"{page.name} cannot be installed:\n{installed.stdout[-2000:]}\n{installed.stderr[-4000:]}"
        )


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "base-rl" / "clients"


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let one process install at a time."""
    with (root / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
