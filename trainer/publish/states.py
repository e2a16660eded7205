"""Trainer states in a version's directory: whole ones at their own cadence, and counters with every version.

A version without a whole state has `trainer_state/counters.json`: the plain values of its state (optimiser steps,
running means, the critic's steps), and the directory and checksum of the whole state that was the newest then. A
trainer that resumes there joins the version's own weights and counters with the tensors of that older state.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
from torch import Tensor

from proxy.contract.policy import STATE_COUNTERS, STATE_DIRECTORY, STATE_INDEX, UNCOMMITTED_MARK, Head
from trainer.errors import WeightsUnusable
from trainer.parallel.checkpoint import load_state, plain_part
from trainer.parallel.mesh import Ranks
from trainer.parallel.state_files import INDEX, refuse_pickles
from trainer.publish.publisher import OLDER_TENSORS, TrainerState

_WHOLE = "state.pt"

_log = structlog.get_logger("trainer.weights")


class StatePlace(msgspec.Struct, frozen=True):
    """The directory of a version with a whole state, by its name in the run's directory, and the SHA-256 of the
    state's index."""

    directory: str
    sha256: str


class _Counters(msgspec.Struct, frozen=True):
    """`counters.json`."""

    plain: dict[str, Any]
    tensors: StatePlace


def write_counters(state: TrainerState, directory: Path, tensors: StatePlace) -> None:
    """Write the plain values of a state whose tensors are those of an older version."""
    path = directory / STATE_COUNTERS
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode(_Counters(plain_part(state), tensors)))


def place_of(head: Head) -> StatePlace | None:
    """Return the whole state that a version has or refers to; None if there is none. Raises WeightsUnusable."""
    if head.weights is None or head.version == 0:
        return None
    directory = Path(head.weights.uri)
    if state_of(directory) is not None and STATE_INDEX in head.weights.files:
        return StatePlace(directory.name, head.weights.files[STATE_INDEX])
    counters = _read_counters(directory)
    if counters is None or state_of(directory.parent / counters.tensors.directory) is None:
        return None
    return counters.tensors


def read_state(
    head: Head, directory: Path, ranks: Ranks, divided: Mapping[str, Tensor | None]
) -> TrainerState | None:
    """Return the trainer state of a verified version, None without one. A collective. Raises WeightsUnusable."""
    own = state_of(directory)
    if own is not None:
        refuse_pickles(own.parent)
        assert head.weights is not None
        if STATE_INDEX not in head.weights.files:
            raise WeightsUnusable(f"{own}: version {head.version} was committed without a checksum of it")
        return load_state(own.parent, ranks, divided)
    counters = _read_counters(directory)
    if counters is None:
        return None
    at = directory.parent / counters.tensors.directory / STATE_DIRECTORY
    # The name is from a file whose checksum was verified, and yet nothing outside the run's directory is read.
    if at.parent.parent != directory.parent or not (at / INDEX).is_file():
        _log.warning("the newest trainer state before this version is gone", state=str(at), version=head.version)
        return None
    if _sha256(at / INDEX) != counters.tensors.sha256:
        raise WeightsUnusable(f"{at / INDEX} is not the file that was written (SHA-256 differs)")
    state = _joined(load_state(at, ranks, divided), counters.plain)
    return {**state, OLDER_TENSORS: True}


def state_of(directory: Path) -> Path | None:
    """Return the file that every whole trainer state has, if it exists."""
    return next((path for name in (INDEX, _WHOLE) if (path := directory / STATE_DIRECTORY / name).is_file()), None)


def remove_old_states(newest: Path, keep: int) -> None:
    """Remove all whole states but the last ones written, besides the one that `newest` has or refers to."""
    settled = [each for each in newest.parent.glob("v*") if not (each / UNCOMMITTED_MARK).exists()]
    states = [state for each in settled if (state := state_of(each)) is not None]
    counters = _read_counters(newest)
    needed = {newest.name} if counters is None else {counters.tensors.directory}
    # By time, not by number: a run that was set back has newer states under lower versions.
    states.sort(key=lambda path: (path.parent.parent.name in needed, path.stat().st_mtime_ns), reverse=True)
    for state in states[keep:]:
        # The index first, so that a process killed here leaves no incomplete state that looks complete.
        state.unlink(missing_ok=True)
    for each in settled:
        if state_of(each) is None and not (each / STATE_COUNTERS).exists():
            shutil.rmtree(each / STATE_DIRECTORY, ignore_errors=True)


def needed_state(directory: Path) -> str | None:
    """Return the name of the older version whose state a version's counters refer to. Raises WeightsUnusable."""
    counters = _read_counters(directory)
    if counters is None:
        return None
    if Path(counters.tensors.directory).name != counters.tensors.directory:
        raise WeightsUnusable(f"{directory / STATE_COUNTERS} names a state outside of the run's directory")
    return counters.tensors.directory


def _read_counters(directory: Path) -> _Counters | None:
    path = directory / STATE_COUNTERS
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Counters)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsUnusable(f"{path} cannot be read: {error}") from error


def _joined(older: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a version with the tensors of an older state at their places."""
    found = dict(plain)
    for key, value in older.items():
        if isinstance(value, Mapping):
            own = plain.get(key)
            found[key] = _joined(value, own if isinstance(own, Mapping) else {})
        elif isinstance(value, Tensor):
            found[key] = value
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
