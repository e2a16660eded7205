"""Decide when a version is at fault: engines refuse it, its files are damaged, or engines die of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from proxy.errors import StorageUnavailable, WeightsMissing, WeightsRejected
from proxy.log import logger
from proxy.serving.records import ServingRecords, Target
from proxy.versions.rejections import Rejections

ATTEMPTS_TO_REJECT = 5
"""Failed loads before a version is given up. With doubling pauses they take half a minute or more, because a network
file system may show new files late."""
SUSPECT_SECONDS = 60.0
"""An engine that dies so soon after a load counts as killed by the version: SGLang dies of some weights only at its
first request."""
_LONGEST_BACKOFF_SECONDS = 60.0

_LOG = logger(__name__)


class _Given(msgspec.Struct, frozen=True):
    """A version that the engine was given at loop time `at`, when `deaths` engines had died of it."""

    version: int
    deaths: int
    at: float

    def is_suspect(self) -> bool:
        """Return whether an engine that dies now counts as killed by the version."""
        return asyncio.get_running_loop().time() - self.at < SUSPECT_SECONDS


class _Failures(msgspec.Struct, frozen=True):
    """A version that failed to load `count` times in a row; no attempt before loop time `retry_at`."""

    version: int
    count: int
    retry_at: float


class VersionFaults:
    """Failed loads and engine deaths of one run's versions. Bad versions are rejected, and the head moves back."""

    def __init__(
        self,
        records: ServingRecords,
        rejections: Rejections,
        *,
        retry_seconds: float,
        swap_failed: Callable[[], None],
    ) -> None:
        """`swap_failed` is called for every failed load and every failed check of a version's files, for metrics."""
        self._records = records
        self._rejections = rejections
        self._retry_seconds = retry_seconds
        self._swap_failed = swap_failed
        self._failures: _Failures | None = None
        self._given: _Given | None = None
        """The version that the engine was given last, until the engine has survived it."""

    def is_due(self, version: int) -> bool:
        """Return whether the version may be loaded now: not during the pause after a failed attempt."""
        failures = self._failures
        if failures is None or failures.version != version:
            return True
        return asyncio.get_running_loop().time() >= failures.retry_at

    async def check_failed(self, version: int, error: WeightsMissing | StorageUnavailable | WeightsRejected) -> None:
        """Reject a version with damaged files at once, and one with missing files after several attempts. Version 0
        is never rejected.

        While the whole storage is away nothing is known about the version, so it is not at fault.
        """
        if isinstance(error, WeightsMissing):
            await self.load_failed(version, error.message, is_version_at_fault=error.is_storage_there)
        elif isinstance(error, StorageUnavailable):
            await self.load_failed(version, error.message, is_version_at_fault=False)
        elif version == 0:
            # The version of another run from which this run began: there is no earlier one to serve in its place.
            await self.load_failed(version, error.message, is_version_at_fault=False)
        else:
            self._swap_failed()
            await self._reject(version, error.message)

    async def load_failed(self, version: int, reason: str, *, is_version_at_fault: bool) -> None:
        """Pause before the next attempt; reject a version that failed too often by its own fault."""
        before = self._failures
        count = before.count + 1 if before is not None and before.version == version else 1
        backoff = min(self._retry_seconds * 2**count, _LONGEST_BACKOFF_SECONDS)
        self._failures = _Failures(version, count, asyncio.get_running_loop().time() + backoff)
        _LOG.error("version not loaded", version=version, attempt=count, retry_seconds=backoff, error=reason)
        self._swap_failed()
        data: dict[str, object] = {"version": version, "attempt": count, "error": reason}
        await self._records.append_event("version.load_failed", data)
        if is_version_at_fault and version > 0 and count >= ATTEMPTS_TO_REJECT:
            await self._reject(version, f"it could not be loaded, {count} times in a row: {reason}")

    async def proof_failed(self, version: int, reason: str) -> None:
        """Reject a version with which an engine computes other figures than the trainer."""
        self._swap_failed()
        await self._reject(version, reason)

    def load_succeeded(self) -> None:
        """Forget failed attempts."""
        self._failures = None

    def version_given(self, target: Target) -> None:
        """Remember that the engine was given the target, and suspect the target from now on."""
        self._given = _Given(target.version, target.deaths, asyncio.get_running_loop().time())

    async def engine_died(self) -> None:
        """Count a death for the version that the engine was given shortly before, if there is one."""
        given, self._given = self._given, None
        if given is not None and given.version > 0 and given.is_suspect():
            await self._rejections.engine_died(given.version, deaths_before=given.deaths)
        else:
            self._failures = None  # another engine may accept what this one refused

    async def engine_lives(self, target: Target, loaded: int | None) -> None:
        """Clear the version's earlier deaths once this engine has lived with it for long enough."""
        if self._given is None or self._given.is_suspect():
            return
        self._given = None
        if loaded == target.version and target.deaths:
            await self._rejections.engine_survived(target.version)

    async def _reject(self, version: int, reason: str) -> None:
        self._failures = None
        await self._rejections.reject(version, reason)
