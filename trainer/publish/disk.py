"""Versions as directories: `DIRECTORY/RUN_ID/v000012-1f6b09c2/`, each readable by `from_pretrained` and by engines.

```
model.safetensors            all weights in the precision of serving, under their Hugging Face names; or several
                             files with model.safetensors.index.json
config.json …                the base model's own files, with the dtype of the weights
adapter/                     where they are merged with an adapter: that, in peft's form
trainer_state/               optimiser, running means, counters (`parallel/state_files.py`); every rank writes its own
                             part. At its own cadence: between, counters.json alone (`states.py`)
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

import json
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

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
from trainer.config import AdapterPublish, SharedDirectory, WeightsDtype
from trainer.errors import WeightsUnusable
from trainer.models.adapters import AdaptedPolicy
from trainer.models.divided import DividedWeights, PublishedWeights
from trainer.models.policy import Policy
from trainer.models.state_dict import ADAPTER_DIRECTORY, config_of_dtype, joint_digest
from trainer.parallel.checkpoint import save_state
from trainer.parallel.mesh import Ranks
from trainer.publish.adapters import merged, save_adapter
from trainer.publish.checksums import checksums
from trainer.publish.directories import flush, is_locked, make_durable_directory, mark, remove_marked, sync
from trainer.publish.publisher import Staged, TrainerState
from trainer.publish.restoring import alone, base_of, restore_version
from trainer.publish.shards import MEGABYTE, write_divided, write_shards
from trainer.publish.states import StatePlace, place_of, remove_old_states, state_of, write_counters

_COMPANIONS = {".json", ".jinja", ".txt", ".model", ".tiktoken"}


def dtype_of(settings: SharedDirectory, device: torch.device) -> torch.dtype:
    """Return the precision in which a trainer on `device` publishes whole weights."""
    if settings.dtype is WeightsDtype.AUTO:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if settings.dtype is WeightsDtype.BFLOAT16 else torch.float32


class Saved(NamedTuple):
    """Weights that have been written. `sums` has the SHA-256 of written files that need not be read again; `sha256`
    and `bytes` are those of the version's safetensors files."""

    format: WeightsFormat
    sums: Mapping[str, str]
    sha256: str
    bytes: int

    @classmethod
    def of_files(cls, form: WeightsFormat, sums: Mapping[str, str], directory: Path) -> Saved:
        """Return the description of safetensors files that lie in `directory`."""
        return cls(form, sums, joint_digest(sums), sum((directory / name).stat().st_size for name in sums))


Saving = Callable[[Path], Callable[[], Saved]]
"""Called on every rank with the directory to write to; returns what the first rank then does there."""


def new_name(head: Head) -> str:
    """Return a name for the directory of a successor of `head`, of which there may be several."""
    return f"v{head.version + 1:06d}-{secrets.token_hex(4)}"


class DiskPublisher:
    """A WeightPublisher over storage that trainer, proxy and engines share.

    `base` is the base model's directory, whose tokenizer and config files every version of whole weights repeats. The
    kind of `policy` decides what is published: an adapter, or whole weights. Without `ranks` this process is alone.
    """

    def __init__(
        self, settings: SharedDirectory, base: Path, policy: Policy | None = None, ranks: Ranks | None = None
    ) -> None:
        self._settings = settings
        self._directory = settings.directory.resolve()
        self._base = base
        self._adapted = policy if isinstance(policy, AdaptedPolicy) else None
        self._ranks = ranks or alone()
        self._dtype = dtype_of(settings, self._ranks.device)
        self.shard_bytes = settings.shard_megabytes * MEGABYTE
        self._locks: dict[str, IO[bytes]] = {}
        self._whole_state: StatePlace | None = None
        """The newest whole state among the head and its ancestors, which versions without one refer to."""

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self._adapted is not None else self._dtype

    @property
    def keeps_weights(self) -> bool:
        return False

    @property
    def publishes_adapters(self) -> bool:
        """Whether versions are adapters alone, without the whole weights that they are merged into."""
        return self._adapted is not None and self._adapted.shape.publish is AdapterPublish.ADAPTER

    def is_state_due(self, head: Head) -> bool:
        return self._whole_state is None or (head.version + 1) % self._settings.optimizer_every == 0

    def stage(
        self,
        head: Head,
        tensors: PublishedWeights,
        state: TrainerState | None,
        *,
        with_tensors: bool = True,
    ) -> Staged:
        """Write the successor of `head`. Raises WeightsUnusable, after removing everything written, if the disk
        refuses."""
        final = self._ranks.from_first(lambda: self._directory / head.run_id / new_name(head))
        saving = partial(self._saving, head, tensors)
        return self._write_to(final, head, saving, state, with_tensors=with_tensors)

    def _write_to(
        self, final: Path, head: Head, saving: Saving, state: TrainerState | None, *, with_tensors: bool = True
    ) -> Staged:
        """Write the successor of `head` to the directory `final`. A collective; raises WeightsUnusable."""
        try:
            return self._write(final, head, saving, state, with_tensors)
        except OSError as error:
            raise WeightsUnusable(
                f"cannot write version {head.version + 1} to {final.parents[1]}: {error}"
            ) from error

    def _write(
        self, final: Path, head: Head, saving: Saving, state: TrainerState | None, with_tensors: bool
    ) -> Staged:
        hidden = self._ranks.from_first(lambda: self._begin(final))
        try:
            if state is not None and with_tensors:
                with mark(hidden):
                    save_state(state, hidden / STATE_DIRECTORY, self._ranks)
            counters = None if with_tensors else state
            save = saving(hidden)
            return self._ranks.from_first(lambda: self._finish(head, hidden, save, counters))
        except BaseException:
            if self._ranks.is_first:
                remove_marked(hidden)
                self._release(str(hidden))
            raise

    def _begin(self, final: Path) -> Path:
        """Create a directory under the hidden form of its name and lock it."""
        make_durable_directory(final.parent)
        hidden = final.with_name(f".{final.name}")
        hidden.mkdir()
        self._locks[str(hidden)] = mark(hidden)
        return hidden

    def _saving(self, head: Head, tensors: PublishedWeights, hidden: Path) -> Callable[[], Saved]:
        """Return how the first rank writes the weights. Those of a divided model are written already, unless they
        are needed whole in memory. A collective."""
        if not isinstance(tensors, DividedWeights):
            return lambda: self._save(head, tensors, hidden)
        if not self._streams:
            gathered = tensors.whole()
            return lambda: self._save(head, gathered, hidden)
        sums, failure = {}, None
        try:
            sums = write_divided(tensors, hidden, self.shard_bytes, self._ranks)
        except OSError as error:
            failure = error

        def save() -> Saved:
            if failure is not None:
                raise failure
            self._copy_companions(hidden)
            return Saved.of_files(WeightsFormat.HUGGINGFACE, sums, hidden)

        return save

    @property
    def _streams(self) -> bool:
        """Whether the weights of a divided model may be written one after the other as they are gathered."""
        return self._adapted is None

    def _finish(self, head: Head, hidden: Path, save: Callable[[], Saved], counters: TrainerState | None) -> Staged:
        """Add the weights and give the directory its name, once every rank has written its part of the state."""
        if counters is not None:
            if self._whole_state is None:
                raise ValueError("no whole state to refer to: a state is due (`is_state_due`)")
            write_counters(counters, hidden, self._whole_state)
        saved = save()
        # Flushed before the rename: after a power cut, a directory under its final name is complete.
        flush(hidden)
        files = checksums(hidden, saved.sums)
        final = hidden.with_name(hidden.name.removeprefix("."))
        hidden.rename(final)
        # The rename itself is durable only when the parent directory is flushed.
        sync(final.parent)
        self._locks[str(final)] = self._locks.pop(str(hidden))
        reference = WeightsReference(
            uri=str(final), format=saved.format, sha256=saved.sha256, bytes=saved.bytes, files=files
        )
        return Staged(parent=head.weights, weights=reference)

    def _save(self, head: Head, tensors: Mapping[str, Tensor], directory: Path) -> Saved:
        """Write weights and companions."""
        adapted = self._adapted
        if adapted is not None and self.publishes_adapters:
            sums = save_adapter(tensors, adapted.config, head.base_model, directory)
            return Saved.of_files(WeightsFormat.ADAPTER, sums, directory)
        if adapted is not None:
            (directory / ADAPTER_DIRECTORY).mkdir()
            save_adapter(tensors, adapted.config, head.base_model, directory / ADAPTER_DIRECTORY)
            tensors = merged(tensors, adapted.config, self._base)
            tensors = {name: tensor.to(self._dtype) for name, tensor in tensors.items()}
        sums = write_shards(tensors, directory, self.shard_bytes)
        self._copy_companions(directory)
        return Saved.of_files(WeightsFormat.HUGGINGFACE, sums, directory)

    def settle(self, staged: Staged) -> None:
        directory = Path(staged.weights.uri)
        if (sha256 := staged.weights.files.get(STATE_INDEX)) is not None:
            self._whole_state = StatePlace(directory.name, sha256)
        self._settle(directory)
        remove_old_states(directory, self._settings.keep_optimizer_states)

    def discard(self, staged: Staged) -> None:
        remove_marked(Path(staged.weights.uri))
        self._release(staged.weights.uri)

    def collect(self, head: Head) -> list[str]:
        run = self._directory / head.run_id
        current = Path(head.weights.uri) if head.weights is not None else None
        if current is not None:
            self._settle(current)
        removed = []
        for marked in sorted(run.glob(f"*/{UNCOMMITTED_MARK}")):
            directory = marked.parent
            # A locked mark belongs to a live trainer that has not committed yet.
            if directory != current and not is_locked(marked):
                remove_marked(directory)
                removed.append(directory.name)
        return removed

    def removable(self, head: Head) -> tuple[str, ...]:
        run = self._directory / head.run_id
        current = head.weights.uri if head.weights is not None else None
        settled = [each for each in sorted(run.glob("v*")) if not (each / UNCOMMITTED_MARK).exists()]
        needed = {current, *(base for each in settled if (base := base_of(each)) is not None)}
        return tuple(str(each) for each in settled if str(each) not in needed and state_of(each) is None)

    def remove(self, uris: Sequence[str]) -> None:
        for uri in uris:
            directory = Path(uri)
            # The proxy names the directories; nothing outside the trainer's own is ever deleted.
            if directory.is_relative_to(self._directory):
                shutil.rmtree(directory, ignore_errors=True)

    def restore(
        self, head: Head, policy: Policy, divided: Mapping[str, Tensor | None] | None = None
    ) -> TrainerState | None:
        state = restore_version(head, self._base, policy, self._ranks, divided, self._directory)
        self._whole_state = None if state is None else place_of(head)
        return state

    def close(self) -> None:
        for uri in list(self._locks):
            self._release(uri)

    def _copy_companions(self, directory: Path) -> None:
        for source in sorted(self._base.iterdir()):
            if source.suffix not in _COMPANIONS or source.name.endswith(".index.json") or not source.is_file():
                continue
            if source.name == "config.json":
                config = config_of_dtype(json.loads(source.read_text()), str(self._dtype).removeprefix("torch."))
                (directory / source.name).write_text(json.dumps(config, indent=2) + "\n")
            else:
                shutil.copyfile(source, directory / source.name)

    def _settle(self, directory: Path) -> None:
        (directory / UNCOMMITTED_MARK).unlink(missing_ok=True)
        self._release(str(directory))

    def _release(self, uri: str) -> None:
        lock = self._locks.pop(uri, None)
        if lock is not None:
            lock.close()
