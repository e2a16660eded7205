"""Settings of how versions are published."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, PositiveInt, Tag, field_validator

from proxy.contract.exchange import GroupBackend
from proxy.contract.memory import default_memory_directory
from proxy.contract.object_store import check_url
from trainer.config.section import Clearable, Section


class WeightsDtype(StrEnum):
    """The precision of published weights. `auto`: bfloat16 if training runs on a GPU, else float32."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class SharedDirectory(Section):
    """Versions are directories on storage that the proxy sees under the same path."""

    type: Literal["disk", "delta", "tensors", "collective"]
    directory: Path = Path(".base-rl/weights")
    url: Annotated[Annotated[str, AfterValidator(check_url)] | None, Clearable] = None
    """An object store, s3://BUCKET/PREFIX, to which each version is copied before its commit. The proxy needs it
    as `server.weights_url`."""
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


def _refuse_url(url: str | None) -> str | None:
    if url is not None:
        raise ValueError("versions in an object store are for engines elsewhere: set type = 'disk' or 'delta'")
    return url


class DiskWeights(SharedDirectory):
    """Each version has all of its weights, and engines read its directory."""

    type: Literal["disk"] = "disk"


class DeltaWeights(SharedDirectory):
    """Versions are differences to the version before. The proxy makes the whole files from which engines read."""

    type: Literal["delta"] = "delta"
    full_every: Annotated[int, Field(ge=2)] = 10
    """Every version after so many has all of its weights, and so has the first one after each start."""


class TensorsWeights(SharedDirectory):
    """Engines on this machine read each version in shared memory, and its directory is written afterwards."""

    type: Literal["tensors"] = "tensors"
    memory_directory: Path | None = None
    """A directory in a file system in memory, the proxy's `server.weights_memory_dir`. None: /dev/shm/base-rl-UID."""

    @property
    def memory(self) -> Path:
        return self.memory_directory or default_memory_directory()

    _check_url = field_validator("url")(_refuse_url)


class CollectiveWeights(SharedDirectory):
    """Engines receive each version from the trainer's first process, and its directory is written afterwards."""

    type: Literal["collective"] = "collective"
    host: Annotated[Annotated[str, Field(min_length=1)] | None, Clearable] = None
    """A name or an address of this machine under which the proxy and the engines reach it. None: the address from
    which it reaches the proxy. The proxy must allow it as one of `server.weights_senders`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The port at which engines are announced; 0: a free one. The transfers use further ones."""
    backend: GroupBackend = GroupBackend.GLOO

    _check_url = field_validator("url")(_refuse_url)


def _type_of(value: object) -> object:
    chosen = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "disk" if chosen is None else chosen


TRANSPORTS = ("disk", "delta", "tensors", "collective")
Weights = Annotated[
    Annotated[DiskWeights, Tag("disk")]
    | Annotated[DeltaWeights, Tag("delta")]
    | Annotated[TensorsWeights, Tag("tensors")]
    | Annotated[CollectiveWeights, Tag("collective")],
    Discriminator(
        _type_of,
        custom_error_type="transport",
        custom_error_message="type should be 'disk', 'delta', 'tensors' or 'collective'",
    ),
]
"""One transport, by `type`; without a type, `disk`."""
