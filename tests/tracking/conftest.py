"""One environment with W&B, MLflow and Trackio as `base-rl[tracking]` requires them, created on first use."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.own_environment import own_environment

ROOT = Path(__file__).parents[2]
# Packages that the sinks need besides their own; base-rl itself would install torch, which they do not use.
BESIDES = ("pydantic", "structlog", "msgspec", "sqlalchemy", "alembic")

Drive = Callable[..., Any]
"""Function of (program in this folder, its arguments, environment variables) that returns the printed JSON."""


@pytest.fixture(scope="session")
def python() -> Path:
    """The environment's interpreter."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = [requirement for sink in ("wandb", "mlflow", "trackio") for requirement in extras[sink]]
    constraints = ROOT / "constraints.txt"
    venv = own_environment(
        "tracking",
        f"{packages}\n{constraints.read_text()}",
        lambda _, install: install("-c", str(constraints), *packages, *BESIDES),
    )
    return venv / "bin" / "python"


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
