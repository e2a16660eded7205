"""One environment with W&B, MLflow and Trackio as `base-rl[tracking]` requires them, created on first use."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Packages that the sinks need besides their own; base-rl itself would install torch, which they do not use.
BESIDES = ("pydantic", "structlog", "msgspec", "sqlalchemy", "alembic")
_SECONDS = 900

Drive = Callable[..., Any]
"""Function of (program in this folder, its arguments, environment variables) that returns the printed JSON."""


@pytest.fixture(scope="session")
def python() -> Path:
    """The environment's interpreter."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = [requirement for sink in ("wandb", "mlflow", "trackio") for requirement in extras[sink]]
    constraints = ROOT / "constraints.txt"
    digest = hashlib.sha256(f"{packages}\n{constraints.read_text()}\n{sys.version}".encode()).hexdigest()[:12]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(base) / "base-rl" / "tracking" / digest
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / ".ready").is_file():
            subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True, timeout=_SECONDS)
            pip = [str(root / "venv/bin/pip"), "install", "-q", "--disable-pip-version-check", "-c", str(constraints)]
            subprocess.run([*pip, *packages, *BESIDES], check=True, timeout=_SECONDS)
            (root / ".ready").touch()
    return root / "venv" / "bin" / "python"


@pytest.fixture
def drive(python: Path, tmp_path: Path) -> Drive:
    def run(program: str, *arguments: str, **variables: str) -> Any:
        kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
        done = subprocess.run(
            [python, "-W", "error::UserWarning", "-m", f"tests.tracking.{program}", *arguments],
            cwd=ROOT,
            env={**kept, "HOME": str(tmp_path), "PATH": os.environ["PATH"], **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
