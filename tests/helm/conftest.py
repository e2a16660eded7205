"""Helm and the schemas of Kubernetes in an environment of their own, made at the first use."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.own_environment import own_environment

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm"
CONSTRAINTS = Path(__file__).parent / "constraints.txt"
_SECONDS = 120
yaml: Any = importlib.import_module("yaml")


class Refused(Exception):
    """Helm does not render the values; the message is its own."""


Render = Callable[[Mapping[str, Any]], str]
"""Returns the manifests for values. Raises Refused."""


@pytest.fixture(scope="session")
def programs() -> Path:
    """Return the folder of the environment's programs: `helm` and `kubernetes-validate`."""
    pins = str(CONSTRAINTS)
    venv = own_environment("helm", CONSTRAINTS.read_text(), lambda _, install: install("--no-deps", "-r", pins))
    return venv / "bin"


@pytest.fixture
def render(programs: Path, tmp_path: Path) -> Render:
    def rendered(values: Mapping[str, Any]) -> str:
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(dict(values)))
        command = [
            str(programs / "helm"),
            "template",
            "rl",
            str(CHART),
            "--namespace",
            "learning",
            "--values",
            str(file),
        ]
        # A home of its own, so that neither plugins nor repositories of the user are read.
        done = subprocess.run(
            command,
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode:
            raise Refused(done.stderr)
        return str(done.stdout)

    return rendered
