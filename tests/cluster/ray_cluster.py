"""An environment with Ray, and a Ray cluster on this machine whose nodes a test adds and kills."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.own_environment import Install, own_environment

ROOT = Path(__file__).parents[2]
_CONSTRAINTS = Path(__file__).parent / "constraints" / "ray.txt"


def ray_python() -> Path:
    """Return an interpreter that has the packages of this one and Ray, installed on first use. Ray is not part of the
    environment of development: it is large, and only its own suite needs it."""
    # The packages of this environment come by their paths, so that torch is not installed again.
    paths = [path for path in sys.path if path and Path(path).is_dir()]

    def fill(venv: Path, install: Install) -> None:
        site = next((venv / "lib").glob("python3*/site-packages"))
        (site / "packages-of-base-rl.pth").write_text("\n".join(paths))
        install("-c", str(ROOT / "constraints.txt"), "-r", str(_CONSTRAINTS))

    return own_environment("ray", f"{_CONSTRAINTS.read_text()}\n{paths}", fill) / "bin" / "python"


class RayCluster:
    """A running cluster. Its head has no room for actors: they need nodes, which tests add."""

    def __init__(self, process: subprocess.Popen[str], python: Path, log: Path) -> None:
        self._process = process
        self._log = log
        self.python = python
        first = self._answer()
        self.address = str(first["address"])
        self._logs = Path(first["logs"])

    def add(self, name: str, **resources: float) -> None:
        """Add a node. `resources` are amounts by Ray's names."""
        self._ask("add", name, resources)

    def lose(self, name: str) -> None:
        """Kill everything that runs on a node, as if its machine were gone."""
        self._ask("lose", name)

    def lose_raylet(self, name: str) -> None:
        """Kill the processes of Ray on a node, and not the actors."""
        self._ask("lose raylet", name)

    def remove(self, name: str) -> None:
        """End a node as `ray stop` does."""
        self._ask("remove", name)

    def actors(self) -> set[str]:
        """Return the names of the living actors."""
        return set(self._ask("actors"))

    def logs(self) -> str:
        """Return the logs of all actors, as Ray's dashboard has them."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._logs.glob("worker-*.out")))

    def _ask(self, *command: Any) -> Any:
        self._send(*command)
        return self._answer()

    def _send(self, *command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(command)}\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the cluster's program has ended; its messages are in {self._log}"
        return json.loads(line)


@contextmanager
def ray_cluster(log: Path) -> Iterator[RayCluster]:
    """Start a cluster of a head alone, and end it with all of its nodes."""
    python = ray_python()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, "-m", "tests.cluster.ray_nodes"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        cluster = RayCluster(process, python, log)
        yield cluster
    finally:
        try:
            # The end of its input ends the program, and the cluster with it.
            process.communicate(timeout=60)
        finally:
            process.kill()
