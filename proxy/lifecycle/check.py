"""Check a store's consistency: its tables, its file, and facts that are recorded twice and must agree.

Synchronous, in one read transaction, so a running proxy can continue to write. The check must not report anything
that the program itself does (erasure, retention, import, a killed process).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, and_, exists, func, or_, select

from proxy.contract.arrays import count_ids, count_logprobs
from proxy.contract.states import ClaimState, TrainingState
from proxy.database.migrate import current, is_known, missing_columns, newest, opened
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    NO_CONVERSATION,
    ClaimedSessionRow,
    ClaimRow,
    PolicyVersionRow,
    RunRow,
    SessionRow,
    TurnRow,
)

_SHOWN = 5
# Turns read at once: bounds memory, as one turn may have a megabyte of arrays.
_PAGE = 500


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of damage: its explanation, how many rows it concerns, and the first few of them."""

    name: str
    detail: str
    count: int
    examples: list[str]


def check(url: str) -> list[Finding]:
    """Return every kind of damage found; an empty list for a consistent store.

    Raise ConfigurationError and StoreUnavailable like `migrate.upgrade` if the store cannot be read.
    """
    revision = current(url)
    if revision != newest():
        detail = f"the store is at revision {revision or 'none'}, and this base-rl works with {newest()}"
        remedy = "upgrade it: base-rl db upgrade" if revision is None or is_known(revision) else "use a newer base-rl"
        return [Finding(name="revision", detail=f"{detail}; {remedy}", count=1, examples=[])]
    with opened(url) as connection:
        missing = missing_columns(connection)
        if missing:
            return [_finding("schema", "tables or columns are missing: restore the store from a backup", missing)]
        findings = [*_integrity(connection)]
        for name, detail, statement in _CONSISTENCY:
            found = [str(row[0]) for row in connection.execute(statement)]
            if found:
                findings.append(_finding(name, detail, found))
        torn = list(_torn_turns(connection))
        if torn:
            findings.append(_finding("arrays", "turns whose tokens and log-probabilities differ in number", torn))
    return findings


def _finding(name: str, detail: str, found: list[str]) -> Finding:
    return Finding(name=name, detail=detail, count=len(found), examples=found[:_SHOWN])


def _integrity(connection: Connection) -> Iterator[Finding]:
    """Report damage that SQLite finds in its file."""
    if connection.dialect.name != "sqlite":  # PostgreSQL has tools of its own: data checksums, amcheck
        return
    damage = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check") if row[0] != "ok"]
    if damage:
        yield _finding("integrity", "SQLite reports damage: restore the store from a backup", damage)
    orphans = [f"{row[0]} {row[1]}" for row in connection.exec_driver_sql("PRAGMA foreign_key_check")]
    if orphans:
        yield _finding("references", "rows refer to other rows that do not exist", orphans)


_COMMITTED = (
    select(func.count())
    .select_from(ClaimedSessionRow)
    .join(ClaimRow, ClaimRow.id == ClaimedSessionRow.claim_id)
    .where(ClaimedSessionRow.session_id == SessionRow.id, ClaimRow.state == ClaimState.COMMITTED.value)
    .scalar_subquery()
)

_CONSUMED = SessionRow.training == TrainingState.CONSUMED.value

_TURN_COUNT = select(func.count()).where(TurnRow.session_id == SessionRow.id).scalar_subquery()

# Rules that a store obeys: a name, an explanation, and a query for the rows that break the rule.
_CONSISTENCY: tuple[tuple[str, str, Select[Any]], ...] = (
    (
        "consumed once",
        "sessions are consumed, and not in exactly one committed claim",
        select(SessionRow.id).where(_CONSUMED, _COMMITTED != 1).order_by(SessionRow.id),
    ),
    (
        "consumed",
        "sessions are in a committed claim, and not consumed",
        select(SessionRow.id)
        .join(ClaimedSessionRow, ClaimedSessionRow.session_id == SessionRow.id)
        .join(ClaimRow, ClaimRow.id == ClaimedSessionRow.claim_id)
        .where(ClaimRow.state == ClaimState.COMMITTED.value, ~_CONSUMED)
        .order_by(SessionRow.id),
    ),
    (
        "leased",
        "sessions are leased, and their claim is not",
        select(SessionRow.id)
        .join(ClaimRow, ClaimRow.id == SessionRow.claim_id, isouter=True)
        .where(
            SessionRow.training == TrainingState.LEASED.value,
            or_(ClaimRow.id.is_(None), ClaimRow.state != ClaimState.LEASED.value),
        )
        .order_by(SessionRow.id),
    ),
    (
        "committed",
        "claims are committed to a version that does not exist",
        select(ClaimRow.id)
        .join(
            PolicyVersionRow,
            and_(PolicyVersionRow.run_id == ClaimRow.run_id, PolicyVersionRow.version == ClaimRow.committed_version),
            isouter=True,
        )
        .where(ClaimRow.state == ClaimState.COMMITTED.value, PolicyVersionRow.version.is_(None))
        .order_by(ClaimRow.id),
    ),
    (
        "beginnings",
        "runs begin from a version of another run that does not exist",
        select(RunRow.name)
        .join(
            PolicyVersionRow,
            and_(
                PolicyVersionRow.run_id == RunRow.begun_from_run_id,
                PolicyVersionRow.version == RunRow.begun_from_version,
            ),
            isouter=True,
        )
        .where(RunRow.begun_from_run_id.is_not(None), PolicyVersionRow.version.is_(None))
        .order_by(RunRow.name),
    ),
    (
        "lineage",
        "sessions in claims whose session or claim does not exist",
        select(ClaimedSessionRow.session_id)
        .where(
            or_(
                ~exists().where(SessionRow.id == ClaimedSessionRow.session_id),
                ~exists().where(ClaimRow.id == ClaimedSessionRow.claim_id),
            )
        )
        .order_by(ClaimedSessionRow.session_id),
    ),
    (
        "erasure",
        "sessions are marked as emptied and still have content",
        select(SessionRow.id)
        .where(
            SessionRow.emptied_at.is_not(None),
            exists().where(TurnRow.session_id == SessionRow.id, TurnRow.conversation_hash != NO_CONVERSATION),
        )
        .order_by(SessionRow.id),
    ),
    (
        "turn counts",
        "the turn count of sessions differs from the number of their turns",
        select(SessionRow.id).where(SessionRow.turn_count != _TURN_COUNT).order_by(SessionRow.id),
    ),
)


def _torn_turns(connection: Connection) -> Iterator[str]:
    """Yield the ids of turns whose arrays disagree with each other or with their counts. Reads all turns."""
    last = ""
    while True:
        rows = connection.execute(_TURNS.where(TurnRow.id > last).limit(_PAGE)).all()
        yield from (row.id for row in rows if _is_torn(row))
        if len(rows) < _PAGE:
            return
        last = rows[-1].id


_TURNS = (
    select(
        TurnRow.id,
        TurnRow.prompt_ids,
        TurnRow.output_ids,
        TurnRow.output_logprobs,
        TurnRow.spans,
        TurnRow.prefix_tokens,
        TurnRow.prompt_token_count,
        TurnRow.conversation_hash,
        SessionRow.erased_at,
    )
    .join(SessionRow, SessionRow.id == TurnRow.session_id, isouter=True)
    .order_by(TurnRow.id)
)


def _is_torn(row: AnyRow) -> bool:
    if row.conversation_hash == NO_CONVERSATION:  # erasure empties the arrays and leaves the length of the prompt
        return row.erased_at is None or any((row.prompt_ids, row.output_ids, row.output_logprobs, row.spans))
    try:
        prompt, output = count_ids(row.prompt_ids), count_ids(row.output_ids)
        logprobs = count_logprobs(row.output_logprobs)
    except ValueError:
        return True
    covered = 0
    for _version, start, end in row.spans:
        if start != covered or end <= start:
            return True
        covered = end
    return logprobs != output or covered != output or row.prefix_tokens + prompt != row.prompt_token_count
