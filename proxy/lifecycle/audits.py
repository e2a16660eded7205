"""One session's audit in the step that consumed it, read without the rest of the step."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, Text, cast, select

from proxy.contract.claim import MaskedTurn
from proxy.database.tables import PolicyVersionRow


class SessionAudit(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a `TrajectoryAudit` about what was not trained: `masked` turns, or the whole session for the reason
    `skipped`."""

    session_id: str
    skipped: str | None = None
    masked: tuple[MaskedTurn, ...] = ()

    @property
    def reasons(self) -> dict[str, str]:
        """The reasons why turns were left out, by turn id."""
        return {turn.turn_id: turn.reason for turn in self.masked}


_AUDITS = msgspec.json.Decoder(tuple[SessionAudit, ...])


def session_audit(connection: Connection, run_id: str, version: int | None, session_id: str) -> SessionAudit | None:
    """Return the session's audit in the step that made `version`; None if there is no step or no audit in it."""
    if version is None:
        return None
    stored = connection.execute(
        select(cast(PolicyVersionRow.audit, Text)).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version
        )
    ).scalar_one_or_none()
    if stored is None:
        return None
    return next((audit for audit in _AUDITS.decode(stored) if audit.session_id == session_id), None)
