"""Policy versions: integers per run. Version 0 is the base model; each committed step makes the next."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from proxy.contract.identifiers import RunId


class VersionState(StrEnum):
    """The life of a version, from its commit to its retirement. A `rejected` one is never served (again): its files
    are damaged, or engines died of it."""

    COMMITTED = "committed"
    SERVING = "serving"
    RETIRED = "retired"
    REJECTED = "rejected"


class WeightsFormat(StrEnum):
    """`huggingface`: a directory that `from_pretrained` reads, with `config.json` and safetensors. `adapter`: one
    that peft's reads over the run's base model, with `adapter_config.json` and `adapter_model.safetensors`."""

    HUGGINGFACE = "huggingface"
    ADAPTER = "adapter"


STATE_DIRECTORY = "trainer_state"
"""Folder of a version that only trainers read, and that they remove from old versions."""
STATE_INDEX = f"{STATE_DIRECTORY}/state.json"
"""The one file of it that `WeightsReference.files` lists: it has the checksums of the others."""
UNCOMMITTED_MARK = ".uncommitted"
"""Empty file of a directory whose commit is not known yet; the only file that is never listed."""


class WeightsReference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a version's weights are. `sha256` and `bytes` are of the safetensors files in order of their names.

    `files` has the SHA-256 of every file of the directory by its path in it, so nothing is read that is not checked.
    It is empty for versions that were committed before base-rl kept it.
    """

    uri: str
    format: WeightsFormat
    sha256: str
    bytes: int
    files: dict[str, str] = {}


class PruneRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks which of the `present` weights (their uris) may be deleted when the newest `keep` versions stay."""

    keep: int
    present: tuple[str, ...]


class PruneReply(msgspec.Struct, frozen=True, kw_only=True):
    """`remove`: those of the `present` weights that the proxy has marked as removed. Nothing refers to them any more;
    whoever asked deletes them, and may die before: it is told the same again."""

    remove: tuple[str, ...]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The version to train from. `weights` is None for version 0: the base model at `base_model`. `formats` are those
    that the run's engine loads; None where it has not said so, as while it starts. `max_new_tokens` bounds one answer
    of the run, `context_length` a prompt with its answer; None: the proxy does not say."""

    run_id: RunId
    run_name: str
    version: int
    base_model: str
    weights: WeightsReference | None
    formats: tuple[WeightsFormat, ...] | None = None
    max_new_tokens: int | None = None
    context_length: int | None = None


MAX_VERSION = 2**31 - 1
"""Versions are stored as 32-bit integers."""

_VERSION_DIGITS = 9
"""Longest number read as a version in a label: labels come from engines, which may say anything."""


def weight_label(run_id: RunId, version: int) -> str:
    """The name under which an engine holds a version: unique across runs and stores."""
    return f"{run_id}@{version}"


def parse_weight_label(label: str) -> tuple[RunId, int] | None:
    """The run and version behind an engine's label; None for a label that base-rl did not give."""
    run_id, separator, version = label.rpartition("@")
    is_number = version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS
    if not separator or not is_number:
        return None
    return RunId(run_id), int(version)
