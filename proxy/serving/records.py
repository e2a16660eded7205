"""The store's side of serving one run: which version to serve, which one is recorded as served, and the event log."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.exchange import Offer
from proxy.contract.identifiers import RunId
from proxy.contract.policy import Probe, WeightsFormat, WeightsReference
from proxy.database.rows import AnyRow
from proxy.database.unit_of_work import Database
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.lifecycle.weights import weights_of
from proxy.versions.repository import VersionRepository
from proxy.versions.withdrawal_repository import WithdrawalRepository


class Target(msgspec.Struct, frozen=True):
    """The version that the engine should serve. `weights` is None for the base model, which
    is version 0 unless the run began from another run's version.

    `recorded` is the version that the store records as served, `deaths` the number of engines that died of the
    target. `probe` is the trainer's, to prove that an engine computes with the version. `local` is the directory of
    the version's whole files, if it is another one than that of `weights`. Before the version `is_saved`, the
    directory of `weights` does not exist, and the files are in the trainer's memory; `is_in_memory` if `local` is
    there. With an `offer` the trainer sends the weights to the engine, and `before` is the version on the disk that
    an engine gets if that fails in the middle. `unseen` is the newer version that should be served and is not saved
    yet, of which this machine sees nothing; another proxy may have given it to the engine.
    """

    version: int
    base_model: str
    weights: WeightsReference | None
    recorded: int
    deaths: int
    probe: Probe | None = None
    local: str | None = None
    is_saved: bool = True
    is_in_memory: bool = False
    unseen: int | None = None
    offer: Offer | None = None
    before: Target | None = None

    @property
    def path(self) -> str:
        """The directory (or, for a base model, perhaps the Hugging Face id) of the weights."""
        return self.base_model if self.weights is None else self.local or self.weights.uri

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are a LoRA adapter over the base model."""
        return self.weights is not None and self.weights.format is WeightsFormat.ADAPTER


class ServingRecords:
    """Reads and writes of the store for one run. Methods raise StoreUnavailable."""

    def __init__(self, *, database: Database, signals: Signals, clock: Clock, run_id: RunId) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock
        self._run_id = run_id

    async def read_target(self, version: int | None = None) -> Target:
        """Return this version, or by default the one that should serve the run."""
        return _target(
            *await self._database.read(lambda connection: VersionRepository(connection).target(self._run_id, version))
        )

    async def read_good_before(self, version: int) -> Target:
        """Return the newest version before this one that is neither rejected nor rolled back."""

        def read(connection: Connection) -> tuple[AnyRow, AnyRow]:
            good = WithdrawalRepository(connection).newest_good(self._run_id, before=version)
            return VersionRepository(connection).target(self._run_id, good)

        return _target(*await self._database.read(read))

    async def may_serve(self, version: int) -> bool:
        """Return whether the store knows the version and it is not rejected."""
        return await self._database.read(
            lambda connection: VersionRepository(connection).may_serve(self._run_id, version)
        )

    async def record_served(self, version: int, *, previous: int, swap_seconds: float | None) -> None:
        """Record that the engine serves `version` in place of `previous`."""
        now = self._clock()

        def record(connection: Connection) -> None:
            repository = VersionRepository(connection)
            repository.mark_served(self._run_id, version, swap_seconds=swap_seconds, now=now)
            data = {"version": version, "previous": previous, "swap_seconds": swap_seconds}
            append_event(connection, run_id=self._run_id, kind="version.served", data=data, now=now)

        await self._database.commit(record)
        self._signals.versions.notify()
        self._signals.events.notify()

    async def asked_since(self, since: float) -> set[int]:
        """Return the versions that calls of any proxy asked for by their number at `since` or later."""
        return await self._database.read(
            lambda connection: VersionRepository(connection).asked_since(self._run_id, since)
        )

    async def append_event(self, kind: str, data: dict[str, object]) -> None:
        """Append to the run's event log."""
        now = self._clock()
        await self._database.commit(
            lambda connection: append_event(connection, run_id=self._run_id, kind=kind, data=data, now=now)
        )
        self._signals.events.notify()


def _target(run: AnyRow, row: AnyRow) -> Target:
    return Target(
        row.version,
        run.base_model,
        weights_of(row),
        run.serving_version,
        int(row.engine_deaths),
        None if row.probe is None else msgspec.convert(row.probe, Probe),
        is_saved=row.is_saved,
        offer=None if row.offer is None else msgspec.convert(row.offer, Offer),
    )
