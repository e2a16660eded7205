"""Starting the trainer in one process or several, and asking it for its resolved configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.cli.extras import require_extras
from proxy.settings import ConfigurationError

_CHECK_TIMEOUT_S = 120.0


def trainer_command(processes: int, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that trains with `arguments`, which are those of `python -m trainer`.

    Raises ConfigurationError where the packages of the extra `train` are not installed.
    """
    require_extras("train")
    module = ("-m", "trainer") if processes == 1 else ("-m", "trainer.launch", str(processes))
    return (sys.executable, *module, *arguments)


def resolved_by_trainer(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration that the trainer would use with these arguments, and `environment` over this process's
    own: that of one run, or, of several, what they share, with each under `runs`. `api_key` is a flag: whether there
    is one. Raises ConfigurationError with the trainer's message."""
    result = subprocess.run(
        trainer_command(1, [*arguments, "--dry-run"]),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_CHECK_TIMEOUT_S,
        check=False,
    )
    if result.returncode != 0:
        raise ConfigurationError(result.stderr.strip() or result.stdout.strip())
    resolved: dict[str, Any] = json.loads(result.stdout)
    return resolved


def runs_of(resolved: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of a configuration from `resolved_by_trainer`."""
    runs: dict[str, dict[str, Any]] = resolved.get("runs", {"": resolved})
    return list(runs.values())
