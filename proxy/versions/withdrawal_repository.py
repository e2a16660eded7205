"""Read and write what takes versions out of service: rejections, rollbacks, pins, and deaths of engines."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, select, update

from proxy.contract.policy import VersionState
from proxy.contract.states import TrainingState
from proxy.database.chunks import chunks
from proxy.database.tables import PolicyVersionRow, RunRow, SessionRow
from proxy.lifecycle.lifecycle import settle
from proxy.versions.repository import UNDECIDED, WITHDRAWN, VersionRepository


class WithdrawalRepository:
    """Reads and writes of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def reject(self, run_id: str, version: int, reason: str, *, now: float) -> bool:
        """Mark a version as rejected, and make the newest good version with weights the head. Return False if it was
        rejected before. Version 0 is never rejected, because it is the base model."""
        statement = (
            update(PolicyVersionRow)
            .where(
                PolicyVersionRow.run_id == run_id,
                PolicyVersionRow.version == version,
                PolicyVersionRow.version > 0,
                PolicyVersionRow.state != VersionState.REJECTED.value,
            )
            .values(state=VersionState.REJECTED.value, rejected_because=reason, rejected_at=now)
        )
        if not self._connection.execute(statement).rowcount:
            return False
        self._leave_withdrawn(run_id)
        return True

    def descendants(self, run_id: str, version: int) -> list[int]:
        """Return the good versions that were made from this one, directly or not, oldest first."""
        statement = (
            select(PolicyVersionRow.version, PolicyVersionRow.parent_version, PolicyVersionRow.state)
            .where(PolicyVersionRow.run_id == run_id, PolicyVersionRow.version > version)
            .order_by(PolicyVersionRow.version)
        )
        family = {version}
        for row in self._connection.execute(statement):
            if row.parent_version in family and row.state not in WITHDRAWN:
                family.add(row.version)
        return sorted(family - {version})

    def take_back(self, run_id: str, versions: Sequence[int], reason: str, *, now: float) -> None:
        """Mark these versions as rolled back."""
        for part in chunks(versions):
            self._connection.execute(
                update(PolicyVersionRow)
                .where(PolicyVersionRow.run_id == run_id, PolicyVersionRow.version.in_(part))
                .values(state=VersionState.ROLLED_BACK.value, rejected_because=reason, rejected_at=now)
            )
        self._leave_withdrawn(run_id)

    def roll_back(self, run_id: str, to: int, reason: str, *, now: float) -> list[int]:
        """Mark the good versions after `to` as rolled back, which makes `to` the head. Return them, oldest first."""
        statement = (
            update(PolicyVersionRow)
            .where(
                PolicyVersionRow.run_id == run_id,
                PolicyVersionRow.version > to,
                PolicyVersionRow.state.not_in(WITHDRAWN),
            )
            .values(state=VersionState.ROLLED_BACK.value, rejected_because=reason, rejected_at=now)
            .returning(PolicyVersionRow.version)
        )
        versions = sorted(self._connection.execute(statement).scalars())
        self._leave_withdrawn(run_id)
        return versions

    def pin(self, run_id: str, version: int | None) -> None:
        """Make engines serve this version from now on; None: the head."""
        self._connection.execute(update(RunRow).where(RunRow.id == run_id).values(pinned_version=version))

    def newest_good(self, run_id: str, *, before: int | None = None, passed: bool = False) -> int:
        """Return the newest version with weights that is neither rejected nor rolled back; with `before`, of those
        older than it; with `passed`, of those that passed their gates."""
        statement = select(func.max(PolicyVersionRow.version)).where(
            PolicyVersionRow.run_id == run_id,
            PolicyVersionRow.state.not_in(WITHDRAWN),
            PolicyVersionRow.weights_removed_at.is_(None),
        )
        if before is not None:
            statement = statement.where(PolicyVersionRow.version < before)
        if passed:
            statement = statement.where(PolicyVersionRow.state.not_in(UNDECIDED))
        return int(self._connection.execute(statement).scalar_one())

    def count_death(self, run_id: str, version: int, *, before: int) -> int:
        """Count the death of an engine with this version if the count is still `before`; return the count."""
        # Compare and set: several proxies may see one death, and only the first of them counts it.
        of_version = (PolicyVersionRow.run_id == run_id) & (PolicyVersionRow.version == version)
        self._connection.execute(
            update(PolicyVersionRow)
            .where(of_version, PolicyVersionRow.engine_deaths == before)
            .values(engine_deaths=before + 1)
        )
        statement = select(PolicyVersionRow.engine_deaths).where(of_version)
        return int(self._connection.execute(statement).scalar_one())

    def rejected_for_deaths(self, run_id: str, *, since: float, deaths: int) -> int | None:
        """Return the newest version that was rejected at `since` or later and of which at least `deaths` engines
        died; None if there is none."""
        statement = select(func.max(PolicyVersionRow.version)).where(
            PolicyVersionRow.run_id == run_id,
            PolicyVersionRow.state == VersionState.REJECTED.value,
            PolicyVersionRow.rejected_at >= since,
            PolicyVersionRow.engine_deaths >= deaths,
        )
        version: int | None = self._connection.execute(statement).scalar_one()
        return version

    def forget_deaths(self, run_id: str, version: int) -> None:
        """Set a version's count of engine deaths to 0."""
        self._connection.execute(
            update(PolicyVersionRow)
            .where(PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version)
            .values(engine_deaths=0)
        )

    def hold_back(self, run_id: str, versions: Sequence[int], *, now: float) -> int:
        """Leave untrained sessions out of training whose newest turn is from one of these versions. Return their
        number."""
        found: list[str] = []
        for part in chunks(versions):
            statement = (
                update(SessionRow)
                .where(
                    SessionRow.run_id == run_id,
                    SessionRow.newest_version.in_(part),
                    SessionRow.training != TrainingState.CONSUMED.value,
                    SessionRow.held_back.is_(False),
                )
                .values(held_back=True)
                .returning(SessionRow.id)
            )
            found += self._connection.execute(statement).scalars()
        settle(self._connection, found, now=now)
        return len(found)

    def _leave_withdrawn(self, run_id: str) -> None:
        """Move the head to the newest good version, and the pin and the promoted version, if theirs was withdrawn, to
        the one before."""
        versions = VersionRepository(self._connection)
        run = versions.run(run_id)
        pinned, promoted = run.pinned_version, run.promoted_version
        if pinned is not None and versions.version(run_id, pinned).state in WITHDRAWN:
            self.pin(run_id, self.newest_good(run_id, before=pinned))
        if promoted is not None and versions.version(run_id, promoted).state in WITHDRAWN:
            versions.promote(run_id, self.newest_good(run_id, before=promoted, passed=True))
        head = self.newest_good(run_id)
        self._connection.execute(update(RunRow).where(RunRow.id == run_id).values(head_version=head))
