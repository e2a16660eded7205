"""The engines in the store: which ones this proxy uses, and what the proxies report to each other about them.

The configuration's engines are registered at the start. Every health interval the proxy reads the rows, so that
engines that were added, drained or removed through another proxy are picked up, and reports its own view.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count

import msgspec
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.contract.identifiers import EngineId, new_engine_id
from proxy.database.now import database_now
from proxy.database.unit_of_work import Database
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.serving.configured import EngineSpec
from proxy.serving.identity import ProxyIdentity, machine_of, this_machine
from proxy.serving.repository import EngineRecord, EngineReport, EngineRepository
from proxy.settings import ConfigurationError

LEASE_SECONDS = 15.0
"""How long the lease of a proxy that died on another machine keeps others from loading. Its owner renews it."""

# A report counts for this long, or for three health intervals if they take longer. An unchanged one is written again
# after a third of it, so an idle installation writes one small row every few seconds.
_REPORT_SECONDS = 15.0
# Smaller changes of the outstanding tokens are not reported: routing needs them coarsely.
_TOKENS_STEP = 4096
_TOKENS_RATIO = 0.25


class EngineRegistry:
    """The engines of the store as this proxy last read them. Methods raise StoreUnavailable."""

    def __init__(
        self,
        *,
        database: Database,
        signals: Signals,
        clock: Clock,
        specs: Sequence[EngineSpec],
        interval_seconds: float,
        identity: ProxyIdentity | None = None,
    ) -> None:
        """`specs` are the engines of this proxy's configuration."""
        self.identity = identity or ProxyIdentity()
        self._database = database
        self._signals = signals
        self._clock = clock
        self._specs = tuple(specs)
        self._valid_seconds = max(_REPORT_SECONDS, 3 * interval_seconds)
        self._declared: frozenset[EngineId] = frozenset()
        self._written: dict[EngineId, tuple[EngineReport, float]] = {}
        self._read_at = 0.0
        """The database's time of the last read."""
        self.records: tuple[EngineRecord, ...] = ()
        """The engines that this proxy uses, oldest first."""
        self.elsewhere: tuple[EngineRecord, ...] = ()
        """The engines that only proxies on other machines reach."""
        self.others: dict[EngineId, tuple[EngineReport, ...]] = {}
        """The reports of the other proxies that run now."""

    @property
    def configured_urls(self) -> tuple[str, ...]:
        """The addresses of the engines of this proxy's configuration."""
        return tuple(spec.url for spec in self._specs)

    async def register(self) -> None:
        """Write the engines of the configuration to the store. Raise ConfigurationError for one whose name or address
        belongs to an engine that was added through the API."""

        def write(connection: Connection) -> frozenset[EngineId]:
            repository = EngineRepository(connection)
            repository.lock()
            now = database_now(connection, self._clock)
            repository.delete_old_reports(now)
            self._delete_forgotten(repository, now)
            declared = frozenset(
                self._register(connection, spec, now + number * 1e-6) for number, spec in enumerate(self._specs)
            )
            # At once, so that another proxy with other engines of these names does not take the rows over.
            first = [
                EngineReport(engine_id=each, proxy=self.identity.name, declares=True, state="starting")
                for each in declared
            ]
            repository.save_reports(first, valid_until=now + self._valid_seconds)
            return declared

        self._declared = await self._database.commit(write)
        self._written.clear()
        self._signals.events.notify()

    def _register(self, connection: Connection, spec: EngineSpec, now: float) -> EngineId:
        """Insert or update the row of a configured engine."""
        repository = EngineRepository(connection)
        machine = machine_of(spec.url)
        self._refuse_added(repository, spec)
        for name in _names(spec.name):
            record = repository.find(name)
            if record is None or record.name != name:
                record = EngineRecord(
                    id=new_engine_id(),
                    name=name,
                    url=spec.url,
                    machine=machine,
                    kind=spec.kind,
                    base_model=spec.base_model,
                    run=spec.run,
                    origin=spec.origin,
                    desired="serving",
                    created_at=now,  # of several engines a little later each, so that they keep their order
                )
                repository.insert(record)
                append_event(connection, run_id=None, kind="engine.added", data=described(record), now=now)
                return record.id
            is_same = (record.url, record.machine) == (spec.url, machine)
            if is_same or not self._is_declared_elsewhere(repository, record, now):
                # `desired` stays: an engine that was drained before a restart stays drained.
                repository.change(
                    record.id,
                    url=spec.url,
                    machine=machine,
                    kind=spec.kind,
                    base_model=spec.base_model,
                    run=spec.run,
                    origin=spec.origin,
                )
                return record.id
        raise AssertionError("unreachable: names are endless")

    def _refuse_added(self, repository: EngineRepository, spec: EngineSpec) -> None:
        for record in repository.all_by_age():
            is_namesake, is_there = record.name == spec.name, same_address(record.url, spec.url)
            if record.origin != "api" or is_namesake == is_there:
                continue  # with the name and the address of an added engine, the configuration takes it over
            if is_namesake:
                raise ConfigurationError(
                    f"engines.{spec.name}: an engine of this name was added at {record.url}: choose another name for"
                    f" the one at {spec.url}, or remove the other with `base-rl engines remove {record.name}`"
                )
            raise ConfigurationError(
                f"engines.{spec.name}.url: the engine {record.name!r} was added with this address: name the table"
                f" [engines.{record.name}], or remove that engine with `base-rl engines remove {record.name}`"
            )

    def _is_declared_elsewhere(self, repository: EngineRepository, record: EngineRecord, now: float) -> bool:
        return any(
            report.engine_id == record.id and report.declares and self._is_other(report)
            for report in repository.reports(now)
        )

    def _delete_forgotten(self, repository: EngineRepository, now: float) -> None:
        """Delete configured engines that no running proxy declares and nobody has drained."""
        named = {report.engine_id for report in repository.reports(now) if report.declares}
        own = {spec.name for spec in self._specs}
        for record in repository.all_by_age():
            is_wanted = record.origin == "api" or record.is_draining or record.name in own
            if not is_wanted and record.id not in named:
                repository.delete(record.id)

    async def read(self) -> None:
        """Read the engines, and the reports of the other proxies."""

        def read(connection: Connection) -> tuple[list[EngineRecord], list[EngineReport]]:
            repository = EngineRepository(connection)
            self._read_at = database_now(connection, self._clock)
            return repository.all_by_age(), repository.reports(self._read_at)

        records, reports = await self._database.read(read)
        if not self._declared <= {record.id for record in records}:
            await self.register()  # somebody has restored an older store, or deleted the rows
            records, reports = await self._database.read(read)
        others: dict[EngineId, tuple[EngineReport, ...]] = {}
        for report in filter(self._is_other, reports):
            others[report.engine_id] = (*others.get(report.engine_id, ()), report)
        self.others = others
        live = [record for record in records if self._is_live(record)]
        self.records = tuple(record for record in live if record.machine in ("", this_machine()))
        self.elsewhere = tuple(record for record in live if record.machine not in ("", this_machine()))

    def declares(self, engine_id: EngineId) -> bool:
        """Return whether the configuration of this proxy names the engine."""
        return engine_id in self._declared

    def tokens_elsewhere(self, engine_id: EngineId) -> int:
        """Return the outstanding tokens of the other proxies' calls at the engine, some seconds old."""
        return sum(report.outstanding_tokens for report in self.others.get(engine_id, ()))

    def others_use(self, engine_id: EngineId) -> bool:
        """Return whether another proxy has runs or calls on the engine."""
        return any(report.is_in_use for report in self.others.get(engine_id, ()))

    def lease_state(self, engine_id: EngineId) -> str:
        """Return `free`, `own`, `taken` by another proxy, or `abandoned` by one that died, as last read."""
        for record in self.records:
            if record.id == engine_id and record.lease_owner is not None and record.lease_until is not None:
                if record.lease_owner == self.identity.name:
                    return "own"
                is_over = record.lease_until <= self._read_at or self.identity.is_gone(record.lease_owner)
                return "abandoned" if is_over else "taken"
        return "free"

    async def take_lease(self, engine_id: EngineId) -> bool:
        """Take or renew the lease of an engine. Return False if another proxy that lives has it."""

        def write(connection: Connection) -> bool:
            repository = EngineRepository(connection)
            record = repository.find(engine_id)
            owner = None if record is None else record.lease_owner
            now = database_now(connection, self._clock)
            return repository.take_lease(
                engine_id,
                self.identity.name,
                now=now,
                until=now + LEASE_SECONDS,
                gone=owner if owner is not None and self.identity.is_gone(owner) else None,
            )

        return await self._database.commit(write)

    async def give_lease_back(self, engine_id: EngineId) -> None:
        """Let other proxies change what the engine holds."""
        name = self.identity.name
        await self._database.commit(lambda connection: EngineRepository(connection).give_lease_back(engine_id, name))

    async def report(self, reports: Sequence[EngineReport]) -> None:
        """Write the reports of this proxy that changed, and those that would soon count no more."""
        now = self._clock()
        due = [report for report in reports if self._is_due(report, now)]
        if not due:
            return

        def write(connection: Connection) -> None:
            until = database_now(connection, self._clock) + self._valid_seconds
            EngineRepository(connection).save_reports(due, valid_until=until)

        await self._database.commit(write)
        self._written.update({report.engine_id: (report, now) for report in due})

    async def mark_drained(self, record: EngineRecord) -> None:
        """Record that all calls at a draining engine have ended, unless another proxy has done so."""

        def write(connection: Connection) -> None:
            if EngineRepository(connection).mark_drained(record.id):
                append_event(
                    connection, run_id=None, kind="engine.drained", data=described(record), now=self._clock()
                )

        await self._database.commit(write)
        self._signals.events.notify()

    async def withdraw(self) -> None:
        """Delete the reports of this proxy, which ends: others need not wait until they count no more."""
        name = self.identity.name
        await self._database.commit(lambda connection: EngineRepository(connection).delete_reports(name))
        self._written.clear()

    def _is_due(self, report: EngineReport, now: float) -> bool:
        before, at = self._written.get(report.engine_id, (None, -math.inf))
        if before is None or now - at >= self._valid_seconds / 3:
            return True
        difference = abs(report.outstanding_tokens - before.outstanding_tokens)
        if difference > max(_TOKENS_STEP, _TOKENS_RATIO * before.outstanding_tokens):
            return True
        # Others need the times and the exact figures less often than anything else that a report has.
        return _without_figures(report) != _without_figures(before)

    def _is_other(self, report: EngineReport) -> bool:
        return report.proxy != self.identity.name and not self.identity.is_gone(report.proxy)

    def _is_live(self, record: EngineRecord) -> bool:
        """Return whether anybody wants the engine used: it was added, or a running proxy's configuration names it."""
        return (
            record.origin == "api"
            or record.id in self._declared
            or any(report.declares for report in self.others.get(record.id, ()))
        )


def same_address(one: str, other: str) -> bool:
    """Return whether two URLs are the address of one engine."""
    return one.rstrip("/").lower() == other.rstrip("/").lower()


def _names(name: str) -> Iterator[str]:
    """Yield the names that a configured engine may get in the store: with the machine's name where another proxy has
    an engine of the same name at another address."""
    yield name
    yield f"{name}@{this_machine()}"
    for number in count(2):
        yield f"{name}@{this_machine()}-{number}"


def described(record: EngineRecord) -> dict[str, object]:
    """Return what events tell about an engine."""
    return {"engine": record.name, "base_model": record.base_model, "origin": record.origin}


def _without_figures(report: EngineReport) -> EngineReport:
    return msgspec.structs.replace(report, calls=min(report.calls, 1), outstanding_tokens=0, seen_at=None)
