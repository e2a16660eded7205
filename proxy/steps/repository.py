"""Rows of committed steps: the version, the claims that it consumed, and their sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, bindparam, select

from proxy.database.chunks import chunks
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    ClaimedSessionRow,
    ClaimRow,
    PolicyVersionRow,
    RunRow,
    SessionRow,
    TurnRow,
)


class StepRepository:
    """Reads within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, run_id: str) -> AnyRow:
        """Return the run's name and base model."""
        return self._connection.execute(select(RunRow.name, RunRow.base_model).where(RunRow.id == run_id)).one()

    def version(self, run_id: str, version: int) -> AnyRow | None:
        statement = select(PolicyVersionRow.__table__).where(
            PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version
        )
        return self._connection.execute(statement).one_or_none()

    def claims(self, claim_ids: Sequence[str]) -> dict[str, AnyRow]:
        found: dict[str, AnyRow] = {}
        for part in chunks(claim_ids):
            for row in self._connection.execute(_CLAIMS, {"ids": part}):
                found[row.id] = row
        return found

    def handed_out(self, claim_ids: Sequence[str]) -> dict[str, list[AnyRow]]:
        """Return the sessions of each claim, in the order of the batch."""
        found: dict[str, list[AnyRow]] = {claim_id: [] for claim_id in claim_ids}
        for part in chunks(claim_ids):
            for row in self._connection.execute(_HANDED_OUT, {"ids": part}):
                found[row.claim_id].append(row)
        return found

    def lacking_turns(self, turn_counts: Mapping[str, int]) -> set[str]:
        """Return the sessions that lack some of their first `turn_counts[session]` turns."""
        kept = dict.fromkeys(turn_counts, 0)
        for part in chunks(list(turn_counts)):
            for row in self._connection.execute(_ORDINALS, {"ids": part}):
                kept[row.session_id] += row.ordinal < turn_counts[row.session_id]
        return {session_id for session_id, count in kept.items() if count < turn_counts[session_id]}


_CLAIMS = select(ClaimRow.id, ClaimRow.base_version, ClaimRow.lease_expires_at).where(
    ClaimRow.id.in_(bindparam("ids", expanding=True))
)

_HANDED_OUT = (
    select(
        ClaimedSessionRow.claim_id,
        ClaimedSessionRow.session_id,
        ClaimedSessionRow.reward,
        ClaimedSessionRow.turn_rewards,
        ClaimedSessionRow.turn_count,
        SessionRow.group_id,
        SessionRow.task,
        SessionRow.first_message,
        SessionRow.erased_at,
    )
    .join(SessionRow, SessionRow.id == ClaimedSessionRow.session_id)
    .where(ClaimedSessionRow.claim_id.in_(bindparam("ids", expanding=True)))
    .order_by(ClaimedSessionRow.claim_id, ClaimedSessionRow.position)
)

_ORDINALS = select(TurnRow.session_id, TurnRow.ordinal).where(
    TurnRow.session_id.in_(bindparam("ids", expanding=True))
)
