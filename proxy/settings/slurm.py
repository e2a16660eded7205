"""Jobs that `base-rl launch slurm` submits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, StringConstraints

from proxy.settings.placement import PlacementSettings

# One line of the script after `#SBATCH `: another line would be shell.
_Option = Annotated[str, StringConstraints(pattern=r"^--[a-z][a-z-]*(=[^\n]*)?$")]
_Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._,:-]*$")]


class SlurmSettings(PlacementSettings):
    """The jobs of one run: one for the trainer's ranks, one for each engine. All see the data directory, the model
    and this Python under the same paths."""

    partition: _Word | None = None
    account: _Word | None = None
    time_limit_minutes: PositiveInt = 1440
    """A job that reaches it stops cleanly and is queued again."""
    stop_seconds: Annotated[int, Field(ge=10, le=3600)] = 120
    """Seconds before the time limit at which a job begins to stop: calls end, claims are given back."""
    max_requeues: NonNegativeInt = 20
    """How often a job that failed is queued again. Time limits and lost nodes do not count."""
    directory: Path | None = None
    """Directory of scripts and logs on shared storage; default: `slurm` in the data directory."""
    setup: tuple[str, ...] = ()
    """Lines of bash at the beginning of every script, such as `module load cuda`."""
    options: tuple[_Option, ...] = ()
    """Further options of `sbatch` for every job, such as `--qos=high`."""
