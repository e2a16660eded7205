"""Rows of engines and of what the proxies report about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, func, insert, or_, select, update

from proxy.contract.identifiers import EngineId
from proxy.database.tables import EngineReportRow, EngineRow

# The PostgreSQL advisory lock of transactions that add, change or remove engines: "engines" in ASCII, so that it
# cannot clash with the locks of migrations and of the event log.
_CHANGE_LOCK = 0x65_6E67_696E_6573


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as the store has it; `EngineRow` explains the fields."""

    id: EngineId
    name: str
    url: str
    machine: str
    kind: str
    base_model: str
    run: str | None
    origin: str
    desired: str
    lease_owner: str | None = None
    lease_until: float | None = None
    created_at: float

    @property
    def is_draining(self) -> bool:
        """Whether proxies send no new calls to the engine."""
        return self.desired in ("draining", "drained")


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one proxy reports about one engine; `EngineReportRow` explains the fields."""

    engine_id: EngineId
    proxy: str
    declares: bool
    state: str
    problem: str | None = None
    runs: dict[str, int | None] = {}
    adapters: tuple[str, ...] = ()
    calls: int = 0
    outstanding_tokens: int = 0
    seen_at: float | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether the proxy has runs on the engine, or calls that have not ended."""
        return bool(self.runs) or self.calls > 0


class EngineRepository:
    """Queries that run within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def lock(self) -> None:
        """Wait for other transactions that add, change or remove engines; they wait for this one until it ends.

        Names, addresses and which engines are left for a run are facts about several rows.
        """
        if self._connection.dialect.name == "postgresql":  # SQLite has one writer at a time
            self._connection.execute(select(func.pg_advisory_xact_lock(_CHANGE_LOCK))).close()

    def all_by_age(self) -> list[EngineRecord]:
        rows = self._connection.execute(_ENGINES.order_by(EngineRow.created_at, EngineRow.id))
        return [_record(row) for row in rows]

    def find(self, name_or_id: str) -> EngineRecord | None:
        """Find an engine by its name, or else by its id."""
        found = _ENGINES.where(or_(EngineRow.name == name_or_id, EngineRow.id == name_or_id))
        row = self._connection.execute(found.order_by(EngineRow.name != name_or_id).limit(1)).first()
        return None if row is None else _record(row)

    def insert(self, record: EngineRecord) -> None:
        self._connection.execute(insert(EngineRow).values(msgspec.structs.asdict(record)))

    def change(self, engine_id: EngineId, **values: Any) -> None:
        self._connection.execute(update(EngineRow).where(EngineRow.id == engine_id).values(**values))

    def mark_drained(self, engine_id: EngineId) -> bool:
        """Change an engine from draining to drained. Return whether it was draining: of several proxies, one sees
        True."""
        draining = update(EngineRow).where(EngineRow.id == engine_id, EngineRow.desired == "draining")
        return self._connection.execute(draining.values(desired="drained")).rowcount == 1

    def delete(self, engine_id: EngineId) -> None:
        """Delete an engine with the reports about it."""
        # Reports first: they refer to the engine.
        self._connection.execute(delete(EngineReportRow).where(EngineReportRow.engine_id == engine_id))
        self._connection.execute(delete(EngineRow).where(EngineRow.id == engine_id))

    def reports(self, now: float) -> list[EngineReport]:
        """Return the reports that still count."""
        found = _REPORTS.where(EngineReportRow.valid_until > now)
        return [msgspec.convert(row._asdict(), EngineReport) for row in self._connection.execute(found)]

    def save_reports(self, reports: Sequence[EngineReport], *, valid_until: float) -> None:
        """Store reports; those about an engine that is gone are left out."""
        known = set(self._connection.execute(select(EngineRow.id)).scalars())
        for report in reports:
            if report.engine_id not in known:
                continue
            values = {**msgspec.structs.asdict(report), "adapters": list(report.adapters), "valid_until": valid_until}
            changed = update(EngineReportRow).where(
                EngineReportRow.engine_id == report.engine_id, EngineReportRow.proxy == report.proxy
            )
            # No race: only the proxy itself writes its reports.
            if self._connection.execute(changed.values(values)).rowcount == 0:
                self._connection.execute(insert(EngineReportRow).values(values))

    def delete_reports(self, proxy: str) -> None:
        """Delete the reports of a proxy."""
        self._connection.execute(delete(EngineReportRow).where(EngineReportRow.proxy == proxy))

    def delete_old_reports(self, now: float) -> None:
        """Delete the reports that count no more."""
        self._connection.execute(delete(EngineReportRow).where(EngineReportRow.valid_until <= now))

    def take_lease(self, engine_id: EngineId, owner: str, *, now: float, until: float, gone: str | None) -> bool:
        """Give the lease of the engine to `owner` if nobody has it, it has ended, or its owner is the proxy `gone`.

        Return whether `owner` has it. One statement, so that of several proxies one gets it.
        """
        is_free = or_(
            EngineRow.lease_owner.is_(None),
            EngineRow.lease_owner == owner,
            EngineRow.lease_until <= now,
            *([] if gone is None else [EngineRow.lease_owner == gone]),
        )
        taken = update(EngineRow).where(EngineRow.id == engine_id, is_free)
        return self._connection.execute(taken.values(lease_owner=owner, lease_until=until)).rowcount == 1

    def give_lease_back(self, engine_id: EngineId, owner: str) -> None:
        mine = update(EngineRow).where(EngineRow.id == engine_id, EngineRow.lease_owner == owner)
        self._connection.execute(mine.values(lease_owner=None, lease_until=None))


def _record(row: Any) -> EngineRecord:
    return msgspec.convert(row._asdict(), EngineRecord)


_ENGINES = select(
    EngineRow.id,
    EngineRow.name,
    EngineRow.url,
    EngineRow.machine,
    EngineRow.kind,
    EngineRow.base_model,
    EngineRow.run,
    EngineRow.origin,
    EngineRow.desired,
    EngineRow.lease_owner,
    EngineRow.lease_until,
    EngineRow.created_at,
)
_REPORTS = select(
    EngineReportRow.engine_id,
    EngineReportRow.proxy,
    EngineReportRow.declares,
    EngineReportRow.state,
    EngineReportRow.problem,
    EngineReportRow.runs,
    EngineReportRow.adapters,
    EngineReportRow.calls,
    EngineReportRow.outstanding_tokens,
    EngineReportRow.seen_at,
)
