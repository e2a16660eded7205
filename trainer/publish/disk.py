"""Versions as directories: `DIRECTORY/RUN_ID/v000012-1f6b09c2/`, each readable by `from_pretrained` and by engines.

```
model.safetensors            all weights, float32, under their Hugging Face names
config.json …                the base model's own files, with the dtype of the weights
adapter/                     where they are merged with an adapter: that, in peft's form
trainer_state/               optimiser, running means, counters (`parallel/state_files.py`); every rank writes its own
.uncommitted                 until the proxy's commit is known; locked by the ranks that write, and the one that waits
```
Of an adapter that is published alone there are, in place of weights and companions, `adapter_model.safetensors` and
`adapter_config.json`, which names the base model.

A directory is written under a hidden name, flushed to the disk and renamed, so under its own name it is whole. With
`.uncommitted` in it and nobody holding its lock it is the leaving of a dead trainer: a version if the proxy's head
refers to it, garbage if not. A trainer settles the head before it trains on, so ancestors of the head never carry the
mark. Every rank stages and restores; only the first settles, discards and collects.

States of earlier trainers (`trainer_state/.metadata` or `state.pt`) are pickles: they are refused, and removed with
the states of old versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import structlog
import torch
from torch import Tensor

from proxy.contract.policy import (
    STATE_DIRECTORY,
    STATE_INDEX,
    UNCOMMITTED_MARK,
    Head,
    WeightsFormat,
    WeightsReference,
)
from trainer.config import AdapterPublish
from trainer.errors import WeightsUnusable
from trainer.models.adapters import AdaptedPolicy
from trainer.models.policy import Policy
from trainer.models.state_dict import ADAPTER_DIRECTORY, digest, float32_config, save_weights, weight_files
from trainer.parallel.checkpoint import load_state, save_state
from trainer.parallel.mesh import Ranks
from trainer.parallel.state_files import INDEX, holds_pickles, refuse_pickles
from trainer.publish.adapters import merged, save_adapter
from trainer.publish.checksums import checksums, verify_version
from trainer.publish.publisher import Staged, TrainerState

_MARK = UNCOMMITTED_MARK
_STATE = STATE_DIRECTORY
_WHOLE = "state.pt"
_COMPANIONS = {".json", ".jinja", ".txt", ".model", ".tiktoken"}

_log = structlog.get_logger("trainer.weights")


class DiskPublisher:
    """A WeightPublisher over storage that trainer, proxy and engines share.

    `base` is the base model's directory, whose tokenizer and config files every version of whole weights repeats. The
    kind of `policy` decides what is published: an adapter, or whole weights. Without `ranks` this process is alone.
    """

    def __init__(
        self,
        directory: Path,
        base: Path,
        keep_optimizer_states: int,
        policy: Policy | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._directory = directory.resolve()
        self._base = base
        self._adapted = policy if isinstance(policy, AdaptedPolicy) else None
        self._keep = keep_optimizer_states
        self._ranks = ranks or _alone()
        self._locks: dict[str, IO[bytes]] = {}

    def stage(self, head: Head, tensors: Mapping[str, Tensor], state: TrainerState | None) -> Staged:
        """Write the successor of `head`. Raises WeightsUnusable, after removing everything written, if the disk
        refuses."""
        try:
            return self._write(head, tensors, state)
        except OSError as error:
            raise WeightsUnusable(f"cannot write version {head.version + 1} to {self._directory}: {error}") from error

    def _write(self, head: Head, tensors: Mapping[str, Tensor], state: TrainerState | None) -> Staged:
        hidden = self._ranks.from_first(lambda: self._begin(head))
        try:
            if state is not None:
                with _mark(hidden):
                    save_state(state, hidden / _STATE, self._ranks)
            return self._ranks.from_first(lambda: self._finish(head, hidden, tensors))
        except BaseException:
            if self._ranks.is_first:
                _remove_marked(hidden)
                self._release(str(hidden))
            raise

    def _begin(self, head: Head) -> Path:
        """Create a hidden directory and lock it."""
        run = self._directory / head.run_id
        _make_durable_directory(run)
        hidden = run / f".v{head.version + 1:06d}-{secrets.token_hex(4)}"
        hidden.mkdir()
        self._locks[str(hidden)] = _mark(hidden)
        return hidden

    def _finish(self, head: Head, hidden: Path, tensors: Mapping[str, Tensor]) -> Staged:
        """Add the weights and give the directory its name, once every rank has written its part of the state."""
        form = self._save(head, tensors, hidden)
        # Flushed before the rename: after a power cut, a directory under its final name is complete.
        _flush(hidden)
        sha256, size = digest(hidden)
        written = weight_files(hidden)
        # The digest of a single file is its checksum, so the file is not read twice.
        files = checksums(hidden, {written[0].name: sha256} if len(written) == 1 else {})
        final = hidden.with_name(hidden.name.removeprefix("."))
        hidden.rename(final)
        # The rename itself is durable only when the parent directory is flushed.
        _sync(final.parent)
        self._locks[str(final)] = self._locks.pop(str(hidden))
        reference = WeightsReference(uri=str(final), format=form, sha256=sha256, bytes=size, files=files)
        return Staged(parent=head.weights, weights=reference)

    def _save(self, head: Head, tensors: Mapping[str, Tensor], directory: Path) -> WeightsFormat:
        adapted = self._adapted
        if adapted is None:
            save_weights(tensors, directory)
        elif adapted.shape.publish is AdapterPublish.MERGED:
            save_weights(merged(tensors, adapted.config, self._base), directory)
            (directory / ADAPTER_DIRECTORY).mkdir()
            save_adapter(tensors, adapted.config, head.base_model, directory / ADAPTER_DIRECTORY)
        else:
            save_adapter(tensors, adapted.config, head.base_model, directory)
            return WeightsFormat.ADAPTER
        self._copy_companions(directory)
        return WeightsFormat.HUGGINGFACE

    def settle(self, staged: Staged) -> None:
        directory = Path(staged.weights.uri)
        self._settle(directory)
        self._prune(directory)

    def discard(self, staged: Staged) -> None:
        _remove_marked(Path(staged.weights.uri))
        self._release(staged.weights.uri)

    def collect(self, head: Head) -> list[str]:
        run = self._directory / head.run_id
        current = Path(head.weights.uri) if head.weights is not None else None
        if current is not None:
            self._settle(current)
        removed = []
        for mark in sorted(run.glob(f"*/{_MARK}")):
            directory = mark.parent
            # A locked mark belongs to a live trainer that has not committed yet.
            if directory != current and not _is_locked(mark):
                _remove_marked(directory)
                removed.append(directory.name)
        return removed

    def removable(self, head: Head) -> tuple[str, ...]:
        run = self._directory / head.run_id
        current = head.weights.uri if head.weights is not None else None
        return tuple(
            str(directory)
            for directory in sorted(run.glob("v*"))
            if str(directory) != current and not (directory / _MARK).exists() and _state_of(directory) is None
        )

    def remove(self, uris: Sequence[str]) -> None:
        for uri in uris:
            directory = Path(uri)
            # The proxy names the directories; nothing outside the trainer's own is ever deleted.
            if directory.is_relative_to(self._directory):
                shutil.rmtree(directory, ignore_errors=True)

    def restore(
        self, head: Head, policy: Policy, divided: Mapping[str, Tensor | None] | None = None
    ) -> TrainerState | None:
        return restore_version(head, self._base, policy, self._ranks, divided, self._directory)

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
        """Remove all optimiser states but the last ones written. The newest version's always stays."""
        settled = [each for each in newest.parent.glob("v*") if not (each / _MARK).exists()]
        states = [state for each in settled if (state := _state_of(each)) is not None]
        # By time, not by number: a run that was set back has newer states under lower versions.
        states.sort(key=lambda path: (path.parent.parent == newest, path.stat().st_mtime_ns), reverse=True)
        for state in states[self._keep :]:
            # The index first, so that a process killed here leaves no incomplete state that looks complete.
            state.unlink(missing_ok=True)
        for each in settled:
            if _state_of(each) is None:
                shutil.rmtree(each / _STATE, ignore_errors=True)


def restore_version(
    head: Head,
    base: Path,
    policy: Policy,
    ranks: Ranks | None = None,
    divided: Mapping[str, Tensor | None] | None = None,
    root: Path | None = None,
) -> TrainerState | None:
    """Load a version into a policy and return its trainer state, sharded as `load_state` says. A collective.

    Return None for version 0, for a version whose state was deleted, and for a state of other weights than the policy
    trains: that of an adapter, if the whole model is trained now. Raises WeightsUnusable, also for a version outside
    `root`.
    """
    if head.weights is None:
        policy.load_base(base)
        return None
    directory = verify_version(head, root)
    # A version 0 with weights is another run's version: its optimiser and running means belong to that run's task.
    state_at = _state_of(directory) if head.version > 0 else None
    if state_at is not None:
        refuse_pickles(state_at.parent)
        if STATE_INDEX not in head.weights.files:
            raise WeightsUnusable(f"{state_at}: version {head.version} was committed without a checksum of it")
    policy.load_version(directory)
    if state_at is None:
        return None
    state = load_state(state_at.parent, ranks or _alone(), divided or {})
    known = policy.elsewhere | {name for name, _ in policy.named_weights()}
    return state if set(state.get("optimizer", ())) <= known else None


def has_weights(weights: WeightsReference) -> bool:
    """Return whether a version's files exist."""
    return any(Path(weights.uri).glob("*.safetensors"))


def has_state(weights: WeightsReference) -> bool:
    """Return whether a version's trainer state exists in a format that can be read."""
    state = Path(weights.uri) / _STATE
    return (state / INDEX).is_file() and not holds_pickles(state)


def _alone() -> Ranks:
    return Ranks(0, 1, torch.device("cpu"), None)


def _state_of(directory: Path) -> Path | None:
    """Return the file that every trainer state has, if it exists."""
    return next((path for name in (INDEX, _WHOLE) if (path := directory / _STATE / name).is_file()), None)


def _mark(directory: Path) -> IO[bytes]:
    """Mark a directory as uncommitted while this process lives and the file is open. Ranks share the lock."""
    lock = (directory / _MARK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _remove_marked(directory: Path) -> None:
    """Remove an uncommitted directory. Its mark goes last, so that it is still garbage after a kill in the middle."""
    for each in directory.glob("*"):
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
        elif each.name != _MARK:
            with contextlib.suppress(OSError):
                each.unlink()
    shutil.rmtree(directory, ignore_errors=True)


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
    """Force a tree's files and directories to the disk."""
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
