"""The environment of an example whose agent needs packages that base-rl does not.

`python -m benchmarks.examples.environment NAME` makes it and prints the path of its Python.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import site
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXAMPLES = Path(__file__).parents[2] / "agents_examples"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_READY = "ready"
_INSTALL_SECONDS = 900


class NotInstalled(Exception):
    """The packages could not be installed. The message has pip's."""


def interpreter_for(folder: Path) -> str:
    """Return the Python that runs an example's agent.

    That is this process's own unless the example has a `requirements.txt`. Then it is the Python of an environment in
    `.venv/examples/NAME`, which has these packages beside those of this environment, or in their place where the
    versions differ. It is made if it does not exist or if the pins have changed (half a minute). Raise NotInstalled
    if that fails.
    """
    requirements = folder / "requirements.txt"
    if not requirements.exists():
        return sys.executable
    # Resolved, because a link to this environment may be removed before the new one is.
    root = Path(sys.prefix).resolve() / "examples" / folder.name
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
    places = [str(Path(place).resolve()) for place in site.getsitepackages()]
    lines = [f"import site; site.addsitedir({place!r})" for place in places]
    (packages / "base.pth").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(root / "bin" / "python"), "install", "--quiet"]
    constraints = root / "constraints.txt"
    constraints.write_text(constraints_beside(requirements.read_text(), CONSTRAINTS.read_text()))
    command += ["--disable-pip-version-check", "-r", str(requirements), "-c", str(constraints)]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    if installed.returncode:
        raise NotInstalled(f"{' '.join(command)}\n{installed.stderr.strip()[-2000:]}")


def constraints_beside(requirements: str, constraints: str) -> str:
    """Return base-rl's constraints without those on packages that the example pins itself: its agent's framework may
    need another version than base-rl does."""
    own = {_name_of(line) for line in requirements.splitlines()} - {None}
    return "".join(f"{line}\n" for line in constraints.splitlines() if _name_of(line) not in own)


def _name_of(line: str) -> str | None:
    """Return the name of the package in a line of pip's format, None of a comment or an empty line."""
    text = line.partition("#")[0].strip()
    return canonicalize_name(Requirement(text).name) if text else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.examples.environment", description=__doc__)
    names = sorted(file.parent.name for file in EXAMPLES.glob("*/requirements.txt"))
    parser.add_argument("name", choices=names, help="the example")
    try:
        print(interpreter_for(EXAMPLES / parser.parse_args().name))
    except NotInstalled as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
