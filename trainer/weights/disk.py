"""Versions as directories: `DIRECTORY/RUN_ID/v000012-1f6b09c2/`, each readable by `from_pretrained` and by engines.

```
model.safetensors            all weights, float32, under their Hugging Face names
config.json …                the base model's own files, with the dtype of the weights
trainer_state/state.pt       optimiser, running means, counters
.uncommitted                 until the proxy's commit is known; locked by the trainer that waits for it
```
A directory is written under a hidden name, flushed to the disk and renamed, so under its own name it is whole. With
`.uncommitted` in it and nobody holding its lock it is the leaving of a dead trainer: a version if the proxy's head
refers to it, garbage if not. A trainer settles the head before it trains on, so ancestors of the head never carry the
mark. Only the first rank stages, settles, discards and collects; every rank restores.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import structlog
import torch
from torch import Tensor

from proxy.contract.policy import Head, WeightsFormat, WeightsReference
from trainer.errors import WeightsUnusable
from trainer.models.state_dict import digest, float32_config, load_weights, save_weights
from trainer.parallel.tensor import NamedWeights
from trainer.weights.publisher import Staged, TrainerState

_MARK = ".uncommitted"
_STATE = Path("trainer_state") / "state.pt"
_COMPANIONS = {".json", ".jinja", ".txt", ".model", ".tiktoken"}

_log = structlog.get_logger("trainer.weights")


class DiskPublisher:
    """A WeightPublisher over storage that trainer, proxy and engines share.

    `base` is the base model's directory, whose tokenizer and config files every version repeats.
    """

    def __init__(self, directory: Path, base: Path, keep_optimizer_states: int) -> None:
        self._directory = directory.resolve()
        self._base = base
        self._keep = keep_optimizer_states
        self._locks: dict[str, IO[bytes]] = {}

    def stage(self, head: Head, tensors: Mapping[str, Tensor], state: TrainerState | None) -> Staged:
        """Writes the successor of `head`. Raises WeightsUnusable where the disk refuses; nothing is left then."""
        try:
            return self._write(head, tensors, state)
        except OSError as error:
            raise WeightsUnusable(f"cannot write version {head.version + 1} to {self._directory}: {error}") from error

    def _write(self, head: Head, tensors: Mapping[str, Tensor], state: TrainerState | None) -> Staged:
        run = self._directory / head.run_id
        _make_durable_directory(run)
        name = f"v{head.version + 1:06d}-{secrets.token_hex(4)}"
        hidden, final = run / f".{name}", run / name
        hidden.mkdir()
        lock = _mark(hidden)
        try:
            save_weights(tensors, hidden)
            self._copy_companions(hidden)
            if state is not None:
                (hidden / _STATE).parent.mkdir()
                torch.save(state, hidden / _STATE)
            _flush(hidden)
            sha256, size = digest(hidden)
            hidden.rename(final)
            _sync(run)
        except BaseException:
            lock.close()
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        reference = WeightsReference(uri=str(final), format=WeightsFormat.HUGGINGFACE, sha256=sha256, bytes=size)
        self._locks[reference.uri] = lock
        return Staged(parent=head.weights, weights=reference)

    def settle(self, staged: Staged) -> None:
        directory = Path(staged.weights.uri)
        self._settle(directory)
        self._prune(directory)

    def discard(self, staged: Staged) -> None:
        shutil.rmtree(staged.weights.uri, ignore_errors=True)
        self._release(staged.weights.uri)

    def collect(self, head: Head) -> list[str]:
        run = self._directory / head.run_id
        current = Path(head.weights.uri) if head.weights is not None else None
        if current is not None:
            self._settle(current)
        removed = []
        for mark in sorted(run.glob(f"*/{_MARK}")):
            directory = mark.parent
            if directory != current and not _is_locked(mark):
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory.name)
        return removed

    def removable(self, head: Head) -> tuple[str, ...]:
        run = self._directory / head.run_id
        current = head.weights.uri if head.weights is not None else None
        return tuple(
            str(directory)
            for directory in sorted(run.glob("v*"))
            if str(directory) != current and not (directory / _MARK).exists() and not (directory / _STATE).exists()
        )

    def remove(self, uris: Sequence[str]) -> None:
        for uri in uris:
            directory = Path(uri)
            if directory.is_relative_to(self._directory):
                shutil.rmtree(directory, ignore_errors=True)

    def restore(self, head: Head, weights: NamedWeights) -> TrainerState | None:
        return restore_version(head, self._base, weights)

    def close(self) -> None:
        for uri in list(self._locks):
            self._release(uri)

    def _copy_companions(self, directory: Path) -> None:
        for source in sorted(self._base.iterdir()):
            if source.suffix not in _COMPANIONS or source.name.endswith(".index.json") or not source.is_file():
                continue
            if source.name == "config.json":
                config = float32_config(json.loads(source.read_text()))
                (directory / source.name).write_text(json.dumps(config, indent=2) + "\n")
            else:
                shutil.copyfile(source, directory / source.name)

    def _settle(self, directory: Path) -> None:
        (directory / _MARK).unlink(missing_ok=True)
        self._release(str(directory))

    def _release(self, uri: str) -> None:
        lock = self._locks.pop(uri, None)
        if lock is not None:
            lock.close()

    def _prune(self, newest: Path) -> None:
        """Removes the optimiser states beyond the newest few, in order of writing, never the newest version's."""
        states = [path for path in newest.parent.glob(f"v*/{_STATE}") if not (path.parent.parent / _MARK).exists()]
        states.sort(key=lambda path: (path.parent.parent == newest, path.stat().st_mtime_ns), reverse=True)
        for state in states[self._keep :]:
            shutil.rmtree(state.parent, ignore_errors=True)


def restore_version(head: Head, base: Path, weights: NamedWeights) -> TrainerState | None:
    """Copies a version's weights into a model; returns its trainer state, None where that was not kept, and for the
    base model. Raises WeightsUnusable."""
    if head.weights is None:
        load_weights(weights, base)
        return None
    directory = Path(head.weights.uri)
    sha256, _ = digest(directory)
    if sha256 != head.weights.sha256:
        raise WeightsUnusable(f"{directory}: the files are not those of version {head.version} (SHA-256 differs)")
    load_weights(weights, directory)
    return _read_state(directory / _STATE)


def has_weights(weights: WeightsReference) -> bool:
    """Whether a version's files are there."""
    return any(Path(weights.uri).glob("*.safetensors"))


def has_state(weights: WeightsReference) -> bool:
    """Whether a version's trainer state was kept."""
    return (Path(weights.uri) / _STATE).is_file()


def _read_state(path: Path) -> TrainerState | None:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise WeightsUnusable(f"{path}: {error}") from error
    if not isinstance(state, dict):
        raise WeightsUnusable(f"{path}: not a trainer state")
    return state


def _mark(directory: Path) -> IO[bytes]:
    """Marks a directory as uncommitted, for as long as this process lives and the file is open."""
    lock = (directory / _MARK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _is_locked(mark: Path) -> bool:
    try:
        with mark.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return True
    return False


def _make_durable_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    missing = [directory, *(parent for parent in directory.parents if not parent.exists())]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _sync(path.parent)


def _flush(directory: Path) -> None:
    """Forces a tree's files and directories to the disk."""
    for root, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
