"""Check published weights in a thread of their own, one version at a time, so that model calls do not wait."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from proxy.contract.delta import DeltaUnusable, LocalWeights, is_delta
from proxy.contract.exchange import Offer
from proxy.contract.memory import place_in_memory
from proxy.contract.object_store import ObjectStore
from proxy.contract.policy import WeightsReference
from proxy.errors import StorageUnavailable, WeightsMissing, WeightsRejected
from proxy.versions.comparison import ParentComparison
from proxy.versions.offers import Senders, check_offer
from proxy.versions.stored import StoredVersions
from proxy.versions.weights import (
    BaseModel,
    Signature,
    check_base,
    check_content,
    check_files,
    check_headers,
    check_listed,
    list_files,
    locate,
    read_base,
    resolve_below,
)

# How long a passed check stays valid while no file changes: long enough for the load that follows a commit, too short
# for a restart days later, because disks lose bits without a trace in the files' times.
_LASTS_SECONDS = 600.0
# Above the other threads' 0: a check takes a whole core for seconds, which model calls should get first.
_NICENESS = 10
# How long a check waits for an object store; whoever asked repeats its request, and what was fetched stays.
STORE_PATIENCE_SECONDS = 30.0
# Passed checks to remember; only the newest few are asked for again.
_REMEMBERED = 64


class WeightsInspector:
    """Checks versions below the storage `root`. Whole files of versions that are stored as differences are made in
    `cache`, which is kept below `cache_bytes`. Versions that are not below `root` are fetched into it from the object
    store `url`. Copies of versions in shared memory are below `memory`. Repeated and concurrent requests for one
    version share one check. Trainers may offer versions from the hosts `senders`. A tensor's size may change by a
    factor of `max_norm_change` between versions."""

    def __init__(
        self,
        root: Path,
        cache: Path | None = None,
        cache_bytes: int = 0,
        *,
        url: str | None = None,
        memory: Path | None = None,
        senders: Sequence[str] = (),
        max_norm_change: float = 10.0,
    ) -> None:
        self._root = root
        self._memory = memory
        self._senders = Senders(senders)
        self._local = LocalWeights(cache or root / ".whole", cache_bytes, self._locate)
        self._stopping = threading.Event()
        self._stored: StoredVersions | None = None
        if url is not None:
            store = ObjectStore(url, STORE_PATIENCE_SECONDS, self._stopping.is_set)
            self._stored = StoredVersions(store, cache or root / ".whole")
        self._comparison = ParentComparison(
            self._local, find_base_directory, self._stopping.is_set, most=max_norm_change
        )
        # One thread: checks read gigabytes, and two at once would only compete for the disk.
        self._thread = ThreadPoolExecutor(1, "weights", initializer=_be_nice)
        self._running: dict[bytes, asyncio.Task[Signature]] = {}
        self._passed: dict[bytes, tuple[Signature, float]] = {}

    async def check(self, weights: WeightsReference, base_model: str) -> None:
        """Check location, files, headers, checksums and numbers of a version, which takes some seconds for each GB.

        Raises WeightsRejected with the reason, and StorageUnavailable if the files cannot be read now.
        """
        if self._memory is not None and Path(weights.uri).is_relative_to(self._memory):
            raise WeightsRejected(f"{weights.uri} is in memory, and a version needs a directory on the disk")
        await self._check_once(weights, base_model)

    async def check_in_memory(self, weights: WeightsReference, base_model: str) -> None:
        """Check a version's copy in shared memory as `check` does. Its directory on the disk need not exist yet.

        Raises WeightsMissing also if there is no copy in this machine's memory.
        """
        resolve_below(weights, self._root)
        copy = self.in_memory(weights)
        if copy is None:
            raise WeightsMissing(
                f"{Path(weights.uri).name} is not in {self._memory}: run trainer and proxy on one machine with"
                " trainer.weights.memory_directory = server.weights_memory_dir, or set trainer.weights.type to disk",
                is_storage_there=False,
            )
        await self._check_once(copy, base_model)

    async def check_offer(self, weights: WeightsReference, offer: Offer, base_model: str) -> None:
        """Check what can be checked of a version that its trainer sends: names, shapes, and from where it comes. Its
        directory need not exist yet. Raises WeightsRejected."""
        resolve_below(weights, self._root)
        self._senders.check(offer.url)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, lambda: check_offer(weights, offer, find_base(base_model)))

    async def check_listing(self, weights: WeightsReference) -> None:
        """Check that a version's directory has its files in their sizes, without reading them.

        Raises WeightsRejected, StorageUnavailable.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._list, weights)

    def in_memory(self, weights: WeightsReference) -> WeightsReference | None:
        """Return the reference to a version's copy in this machine's shared memory; None without one."""
        try:
            place = None if self._memory is None else place_in_memory(weights, self._memory)
        except ValueError:
            return None
        if place is None or not place.is_dir():
            return None
        return msgspec.structs.replace(weights, uri=str(place))

    async def _check_once(self, weights: WeightsReference, base_model: str) -> None:
        key = msgspec.msgpack.encode((weights, base_model))
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._check(key, weights, base_model))
            task.add_done_callback(lambda _: self._running.pop(key, None))
        # Shielded: a trainer that repeats its commit after a time-out must find the first check still running.
        await asyncio.shield(task)

    async def compare(
        self, weights: WeightsReference, parent: WeightsReference | None, base_model: str, *, floor: float
    ) -> None:
        """Check that no tensor of a version that has passed `check` is far larger or smaller than in its parent, the
        base model for None; sizes below `floor` count as `floor`. A parent whose files are not here is not compared.

        Raises WeightsRejected, and StorageUnavailable while the proxy stops.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._compare, weights, parent, base_model, floor)

    def path_of(self, weights: WeightsReference) -> str:
        """Return the directory from which engines read a version that has passed its check."""
        if self._stored is None or not weights.files or is_delta(weights) or self._is_here(weights):
            return self._local.path_of(weights)
        return str(self._stored.path_of(weights))

    def remove_stored(self, run_id: str) -> None:
        """Remove a run's versions from the object store, if there is one. Raises OSError."""
        if self._stored is not None:
            self._stored.remove_run(run_id)

    async def aclose(self) -> None:
        """Stop a running check, which would otherwise delay the end of the process until it has read everything."""
        self._stopping.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _check(self, key: bytes, weights: WeightsReference, base_model: str) -> Signature:
        loop = asyncio.get_running_loop()
        before, at = self._passed.pop(key, (None, 0.0))
        is_fresh = loop.time() - at < _LASTS_SECONDS
        signature = await loop.run_in_executor(
            self._thread, self._work, weights, base_model, before if is_fresh else None
        )
        # If only the signature was compared, the time of the last full read stays.
        self._passed[key] = (signature, at if signature == before and is_fresh else loop.time())
        while len(self._passed) > _REMEMBERED:
            del self._passed[next(iter(self._passed))]
        return signature

    def _is_here(self, weights: WeightsReference) -> bool:
        directory = Path(weights.uri)
        return directory.is_absolute() and directory.is_relative_to(self._root) and directory.is_dir()

    def _list(self, weights: WeightsReference) -> None:
        try:
            check_files(weights, locate(weights, self._root))
        except OSError as error:
            raise StorageUnavailable(f"{weights.uri} cannot be read: {error.strerror or error}") from error

    def _locate(self, weights: WeightsReference) -> Path:
        if self._memory is not None and Path(weights.uri).is_relative_to(self._memory):
            return locate(weights, self._memory)
        # Versions from before the checksums of all files cannot be fetched, because nothing names their objects.
        if self._stored is None or not weights.files or self._is_here(weights):
            directory = locate(weights, self._root)
        else:
            check_listed(weights)
            directory = self._stored.fetch(weights)
        list_files(directory)  # refuses links, which would lead a copy out of the directory
        return directory

    def _work(self, weights: WeightsReference, base_model: str, before: Signature | None) -> Signature:
        try:
            return self._inspect(weights, base_model, before)
        except WeightsRejected:
            # Files that were made of a difference or fetched may be damaged since, which is no fault of the version.
            if not self._discarded(weights):
                raise
        return self._inspect(weights, base_model, None)

    def _discarded(self, weights: WeightsReference) -> bool:
        try:
            chain = self._local.chain(weights)
            made = is_delta(weights) and self._local.discard(weights)
            return any([made, *(self._stored.discard(each) for each in chain if self._stored is not None)])
        except (DeltaUnusable, WeightsRejected, OSError):
            return False

    def _inspect(self, weights: WeightsReference, base_model: str, before: Signature | None) -> Signature:
        try:
            whole, directory = self._local.materialise(weights)
            signature = check_files(whole, directory)
            if signature != before:
                check_base(whole, directory, base_model)
                headers = check_headers(whole, directory, find_base(base_model))
                squares: dict[str, float] = {}
                check_content(whole, directory, headers, self._stopping.is_set, squares)
                self._comparison.learn(weights, squares, headers)
        except FileNotFoundError as error:
            raise WeightsMissing(f"{error.filename} disappeared while it was checked") from error
        except DeltaUnusable as error:
            raise WeightsRejected(str(error)) from error
        except InterruptedError as error:
            raise StorageUnavailable("the proxy is stopping") from error
        except OSError as error:
            raise StorageUnavailable(f"{weights.uri} cannot be read: {error.strerror or error}") from error
        return signature

    def _compare(
        self, weights: WeightsReference, parent: WeightsReference | None, base_model: str, floor: float
    ) -> None:
        try:
            self._comparison.compare(weights, parent, base_model, floor=floor)
        except InterruptedError as error:
            raise StorageUnavailable("the proxy is stopping") from error


def find_base(model: str) -> BaseModel | None:
    """Return the tensors and configuration of a base model that `find_base_directory` finds.

    None if it finds none; the check then compares no shapes.
    """
    directory = find_base_directory(model)
    return None if directory is None else read_base(directory)


def find_base_directory(model: str) -> Path | None:
    """Return the files of a base model, a directory or a Hugging Face id in this machine's cache.

    None if the model is not on this machine: only a remote engine may have the weights, so nothing is downloaded.
    """
    directory = Path(model)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(model, allow_patterns=["*.safetensors", "config.json"], local_files_only=True)
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None
    return Path(found)


def _be_nice() -> None:
    """Give the event loop precedence; on Linux every thread has a niceness of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
