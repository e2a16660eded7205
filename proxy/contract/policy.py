"""Policy versions: integers per run. Version 0 is the base model, or a version of another run; each committed step
makes the next."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec

from proxy.contract.identifiers import RunId


class VersionState(StrEnum):
    """The life of a version, from its commit to its retirement. A `candidate` waits for its gates, or for somebody to
    promote it; a `canary` answers a share of new sessions; a `committed` one may serve. A `rejected` version is never
    served (again): its files are damaged, engines died while loading or serving it, a gate refused it, or somebody
    rejected it. A `rolled_back` version is sound, but the run was taken back to one before it."""

    CANDIDATE = "candidate"
    CANARY = "canary"
    COMMITTED = "committed"
    SERVING = "serving"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"


class WeightsFormat(StrEnum):
    """The layout of a version's directory.

    `huggingface`: `config.json` and safetensors, as `from_pretrained` reads them. `adapter`: `adapter_config.json`
    and `adapter_model.safetensors`, as peft reads them over the run's base model.
    """

    HUGGINGFACE = "huggingface"
    ADAPTER = "adapter"


STATE_DIRECTORY = "trainer_state"
"""The folder of a version that only trainers read. They remove it from old versions."""
STATE_INDEX = f"{STATE_DIRECTORY}/state.json"
"""A trainer state's index, which is in `WeightsReference.files` and has the checksums of the state's other files."""
STATE_COUNTERS = f"{STATE_DIRECTORY}/counters.json"
"""The only file of that folder in a version without a trainer state of its own; it refers to an older one."""
UNCOMMITTED_MARK = ".uncommitted"
"""An empty file in a directory whose commit is not yet confirmed; never listed in `WeightsReference.files`."""


class WeightsReference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The location and checksums of a version's weights. `bytes` is the size of its safetensors files together.
    `sha256` is the checksum of a single safetensors file; of several, the SHA-256 of their checksums in order of
    their names.

    `files` maps the path of every file in the directory to its SHA-256, so that only verified files are read. It is
    empty for versions that were committed before base-rl recorded it.
    """

    uri: str
    format: WeightsFormat
    sha256: str
    bytes: int
    files: dict[str, str] = {}


_MOST_PROBED = 32


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fixed sequence of token ids with the log-probability of each id after the first, under a version's weights.

    The trainer computes it with the weights that it publishes, in float32 and at temperature 1. An engine that has
    loaded the version gives nearly the same numbers; one that computes with other weights does not.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 2 <= len(self.ids) <= _MOST_PROBED or len(self.logprobs) != len(self.ids) - 1:
            raise ValueError(f"2 to {_MOST_PROBED} ids, and a log-probability for each but the first")
        if min(self.ids) < 0 or not all(math.isfinite(each) and each <= 0 for each in self.logprobs):
            raise ValueError("ids are at least 0, log-probabilities are finite and at most 0")


class PruneRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question which of the `present` weights (uris) may be deleted while the newest `keep` versions stay, and
    every `keep_every`-th version."""

    keep: int
    present: tuple[str, ...]
    keep_every: int | None = None


class PruneReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a `PruneRequest`. `remove` are the `present` weights that the proxy has marked as removed and
    that nothing refers to. The trainer deletes them; if it dies before, the next request returns them again."""

    remove: tuple[str, ...]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The version to train from. `weights` is None for the base model at `base_model`, which is version 0 unless the
    run began from another run's version.

    `formats` are those that the run's engine loads; None while the engine has not reported them, for example while it
    starts. `max_new_tokens` bounds one answer of the run, `context_length` a prompt with its answer; None from
    proxies that do not send them.

    `weights_kind` is `full`, or `adapter` if each version of the run must be an adapter. `trainer` has the run's own
    settings of the trainer, nested by section as in the file.

    If not `is_saved`, the version is in its trainer's memory and perhaps nowhere else, and its claims are still
    leased. A trainer that finds such a head at its start has it taken back, and trains from the one before.
    """

    run_id: RunId
    run_name: str
    version: int
    base_model: str
    weights: WeightsReference | None
    formats: tuple[WeightsFormat, ...] | None = None
    max_new_tokens: int | None = None
    context_length: int | None = None
    weights_kind: str = "full"
    trainer: dict[str, Any] = {}
    is_saved: bool = True


MAX_VERSION = 2**31 - 1
"""Versions are stored as 32-bit integers."""

# The longest number read as a version in a label: labels come from engines, which may report anything.
_VERSION_DIGITS = 9


def weight_label(run_id: RunId, version: int) -> str:
    """Return the name of a version at an engine, unique across runs and stores."""
    return f"{run_id}@{version}"


def parse_weight_label(label: str) -> tuple[RunId, int] | None:
    """Return the run and version that an engine's label names; None for a label that is not base-rl's."""
    run_id, separator, version = label.rpartition("@")
    is_number = version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS
    if not separator or not is_number:
        return None
    return RunId(run_id), int(version)
