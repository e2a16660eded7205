"""Settings of how versions are published."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from trainer.config.section import Clearable, Section


class WeightsDtype(StrEnum):
    """The precision of published weights. `auto`: bfloat16 if training runs on a GPU, else float32."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DiskWeights(Section):
    """Versions are directories on storage that the proxy and its engines see under the same path."""

    type: Literal["disk"] = "disk"
    directory: Path = Path(".base-rl/weights")
    dtype: WeightsDtype = WeightsDtype.AUTO
    """The precision of whole weights. Adapters are float32."""
    shard_megabytes: Annotated[int, Field(ge=1)] = 5000
    """Largest safetensors file, unless a single tensor is larger."""
    behind: bool | None = None
    """Write and commit a version while the next step is computed. None: if there is one process, and
    `batch.max_staleness` allows a batch to be one version older."""
    optimizer_every: PositiveInt = 1
    """Every n-th version has the optimiser's state; a restart from another version goes on with the state of the
    newest one before it."""
    keep_optimizer_states: PositiveInt = 2
    """Number of the newest optimiser states that are kept."""
    keep_versions: Annotated[PositiveInt | None, Clearable] = None
    """Number of the newest versions whose weights are kept, besides versions that serve or have an optimiser state;
    None: all."""
    keep_every: Annotated[PositiveInt | None, Clearable] = None
    """With `keep_versions`: every n-th version is kept as well; None: none of them."""
