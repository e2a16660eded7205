"""The transactions by which gates decide: begin a canary, promote, reject, roll back.

Each locks the run first, and does nothing if the version was decided about meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from proxy.contract.policy import VersionState
from proxy.database.rows import AnyRow
from proxy.gates.findings import Finding
from proxy.gates.repository import GateRepository
from proxy.lifecycle.events import append_event
from proxy.log import logger
from proxy.runs.service import RunView
from proxy.versions.release import pass_version
from proxy.versions.repository import UNDECIDED, WITHDRAWN, VersionRepository
from proxy.versions.withdrawal_repository import WithdrawalRepository

BY = "gates"
"""Who decided, in events, where a person's key would be named."""

_LOG = logger(__name__)


def start_shadow(run: RunView, version: int, connection: Connection, *, now: float) -> None:
    """Let a candidate answer a share of the prompts unseen, unless another version is on trial."""
    versions, repository = VersionRepository(connection), GateRepository(connection)
    versions.run(run.id, lock=True)
    others = [row for row in repository.undecided(run.id) if row.version != version and is_on_trial(row)]
    if others or not repository.start_shadow(run.id, version, now=now):
        return
    data = {"version": version, "share": run.settings.release.shadow.share, "by": BY}
    append_event(connection, run_id=run.id, kind="version.shadow", data=data, now=now)


def is_on_trial(row: AnyRow) -> bool:
    """Return whether an undecided version answers calls, or prompts unseen."""
    return row.state == VersionState.CANARY or row.shadow_at is not None


def start_canary(
    run: RunView, version: int, findings: Sequence[Finding], connection: Connection, *, now: float
) -> None:
    """Let a candidate answer a share of new sessions. The findings of the gates before are its evidence from now
    on."""
    versions, repository = VersionRepository(connection), GateRepository(connection)
    versions.run(run.id, lock=True)
    others = [row for row in repository.undecided(run.id) if row.state == VersionState.CANARY]
    if others or not repository.start_canary(run.id, version, now=now):
        return
    _save(repository, run, version, findings, now)
    data = {"version": version, "share": run.settings.release.canary.share, "by": BY}
    append_event(connection, run_id=run.id, kind="version.canary", data=data, now=now)


def promote(
    run: RunView, version: int, findings: Sequence[Finding], reason: str, connection: Connection, *, now: float
) -> None:
    """Make a version the one that engines should serve, and retire older ones that still wait."""
    versions, repository = VersionRepository(connection), GateRepository(connection)
    versions.run(run.id, lock=True)
    if versions.version(run.id, version).state not in UNDECIDED:
        return
    _save(repository, run, version, findings, now)
    change = pass_version(versions, run, version)
    for row in repository.undecided(run.id):
        if row.version < version:
            versions.set_state(run.id, row.version, VersionState.RETIRED)
    data = {**change.data, "reason": reason, "by": BY}
    append_event(connection, run_id=run.id, kind=change.event, data=data, now=now)
    _LOG.info("version promoted", run=run.name, version=version)


def reject(
    run: RunView, version: int, findings: Sequence[Finding], reason: str, connection: Connection, *, now: float
) -> None:
    """Reject an undecided version and take back those that were made from it: the trainer goes on from the newest
    version that is left."""
    versions, repository = VersionRepository(connection), GateRepository(connection)
    withdrawals = WithdrawalRepository(connection)
    versions.run(run.id, lock=True)
    if versions.version(run.id, version).state not in UNDECIDED:
        return
    _save(repository, run, version, findings, now)
    descendants = withdrawals.descendants(run.id, version)
    withdrawals.reject(run.id, version, reason, now=now)
    withdrawals.take_back(run.id, descendants, f"made from version {version}, which its gates refused", now=now)
    left_out = 0
    if run.settings.release.rollback.leave_out_sessions:
        left_out = withdrawals.hold_back(run.id, [version, *descendants], now=now)
    data = {
        "version": version,
        "head": versions.run(run.id).head_version,
        "rolled_back": descendants,
        "sessions_left_out": left_out,
        "reason": reason,
        "by": BY,
    }
    append_event(connection, run_id=run.id, kind="version.rejected", data=data, now=now)
    _LOG.warning("version refused by its gates", run=run.name, version=version, reason=reason)


def roll_back(run: RunView, version: int, finding: Finding, connection: Connection, *, now: float) -> None:
    """Go back to the newest version before `version`, which serves or served and is worse than those before it."""
    versions, repository = VersionRepository(connection), GateRepository(connection)
    withdrawals = WithdrawalRepository(connection)
    if versions.run(run.id, lock=True).pinned_version is not None:
        return
    if versions.version(run.id, version).state in WITHDRAWN:
        return
    to = withdrawals.newest_good(run.id, before=version, passed=True)
    _save(repository, run, version, [finding], now)
    rolled_back = withdrawals.roll_back(run.id, to, finding.text, now=now)
    left_out = 0
    if run.settings.release.rollback.leave_out_sessions:
        left_out = withdrawals.hold_back(run.id, rolled_back, now=now)
    numbers = {name: finding.evidence.get(name) for name in ("difference", "low", "high", "error_rate")}
    data = {
        "to": to,
        "versions": rolled_back,
        "suspect": version,
        "sessions_left_out": left_out,
        "reason": finding.text,
        "evidence": numbers,
        "by": BY,
    }
    append_event(connection, run_id=run.id, kind="version.rolled_back", data=data, now=now)
    _LOG.error("rolled back", run=run.name, to=to, versions=rolled_back, reason=finding.text)


def _save(repository: GateRepository, run: RunView, version: int, findings: Sequence[Finding], now: float) -> None:
    for finding in findings:
        repository.save(run.id, version, finding, now=now)
