"""Keep new sessions of a key, or a share of all, on one version while others move on."""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select

from proxy.clock import Clock
from proxy.contract.identifiers import new_hold_id
from proxy.database.rows import AnyRow
from proxy.database.tables import ApiKeyRow, VersionHoldRow
from proxy.database.unit_of_work import Database
from proxy.errors import Conflict, InvalidRequest, NotFound
from proxy.gates.views import HoldView
from proxy.lifecycle.events import append_event
from proxy.lifecycle.signals import Signals
from proxy.runs.service import RunView
from proxy.versions.repository import VersionRepository
from proxy.versions.steering import Decision, require_servable

# A call's routing looks at each of a run's holds.
_MOST_HOLDS = 20


class VersionHolds:
    """Holds of all runs."""

    def __init__(self, *, database: Database, signals: Signals, clock: Clock) -> None:
        self._database = database
        self._signals = signals
        self._clock = clock

    async def list_(self, run: RunView) -> tuple[HoldView, ...]:
        """Return the holds of a run, oldest first."""
        rows = await self._database.read(lambda connection: _holds(connection, run.id))
        return tuple(_view(row) for row in rows)

    async def hold(
        self, run: RunView, version: int, decision: Decision, *, key_id: str | None, share: float | None
    ) -> HoldView:
        """Keep the sessions that a key begins from now on, or a share of all that begin, on a version.

        Raise NotFound for an unknown version or key, Conflict for a version that cannot be served, for a key that is
        held already, and for shares beyond one half together with the canary's.
        """
        if (key_id is None) == (share is None):
            raise InvalidRequest("give either a key or a share of sessions", param="share")
        now = self._clock()
        values = {
            "id": new_hold_id(),
            "run_id": run.id,
            "version": version,
            "key_id": key_id,
            "share": share,
            "reason": decision.reason,
            "created_at": now,
        }

        def write(connection: Connection) -> None:
            versions = VersionRepository(connection)
            versions.run(run.id, lock=True)
            require_servable(versions, run, version)
            held = _holds(connection, run.id)
            if len(held) >= _MOST_HOLDS:
                raise Conflict(f"the run {run.name!r} has {_MOST_HOLDS} holds, which is the most: release one")
            if key_id is not None:
                _check_key(connection, run, key_id, held)
            taken = sum(row.share or 0.0 for row in held) + run.settings.release.canary.share
            if share is not None and taken + share > 1.0:
                raise Conflict(
                    f"{taken:g} of the sessions are held or for canaries, so {share:g} more are too many",
                    param="share",
                )
            connection.execute(insert(VersionHoldRow).values(values))
            data = {**values, "by": decision.by}
            del data["run_id"], data["created_at"]
            append_event(connection, run_id=run.id, kind="version.held", data=data, now=now)

        await self._database.commit(write)
        self._notify()
        del values["run_id"]
        return HoldView(**values)  # type: ignore[arg-type]

    async def release(self, run: RunView, hold_id: str, decision: Decision) -> None:
        """End a hold: its sessions are answered by the serving version again. Raise NotFound."""
        now = self._clock()

        def write(connection: Connection) -> None:
            row = next((row for row in _holds(connection, run.id) if row.id == hold_id), None)
            if row is None:
                raise NotFound(f"the run {run.name!r} has no hold {hold_id!r}")
            connection.execute(delete(VersionHoldRow).where(VersionHoldRow.id == hold_id))
            data = {"id": hold_id, "version": row.version, "reason": decision.reason, "by": decision.by}
            append_event(connection, run_id=run.id, kind="version.released", data=data, now=now)

        await self._database.commit(write)
        self._notify()

    def _notify(self) -> None:
        self._signals.versions.notify()
        self._signals.events.notify()


def _holds(connection: Connection, run_id: str) -> list[AnyRow]:
    statement = select(VersionHoldRow.__table__).where(VersionHoldRow.run_id == run_id)
    return list(connection.execute(statement.order_by(VersionHoldRow.id)))


def _check_key(connection: Connection, run: RunView, key_id: str, held: list[AnyRow]) -> None:
    statement = select(ApiKeyRow.run_id, ApiKeyRow.project_id).where(ApiKeyRow.id == key_id)
    row = connection.execute(statement).one_or_none()
    if row is None or (row.run_id != run.id and row.project_id != run.project_id):
        raise NotFound(
            f"no key {key_id!r} calls the run {run.name!r}: `base-rl keys list` shows them", param="key_id"
        )
    if any(each.key_id == key_id for each in held):
        raise Conflict(f"the key {key_id!r} is held on a version already: release it first", param="key_id")


def _view(row: AnyRow) -> HoldView:
    return HoldView(**{name: getattr(row, name) for name in HoldView.__struct_fields__})
