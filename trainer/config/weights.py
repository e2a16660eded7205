"""Settings of the directory in which versions are published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import PositiveInt

from trainer.config.section import Clearable, Section


class DiskWeights(Section):
    """Versions are directories on storage that the proxy and its engines see under the same path."""

    type: Literal["disk"] = "disk"
    directory: Path = Path(".base-rl/weights")
    keep_optimizer_states: PositiveInt = 2
    """Number of the newest versions whose optimiser states are kept."""
    keep_versions: Annotated[PositiveInt | None, Clearable] = None
    """Number of the newest versions whose weights are kept, besides versions that serve or have an optimiser state;
    None: all."""
