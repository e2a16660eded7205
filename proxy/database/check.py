"""Looks whether a store is whole: its tables, what the database says of itself, and the accounts that must agree.

Synchronous and on one connection, with or without a proxy running: all of it is one look at one committed state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Select, and_, exists, func, or_, select

from proxy.contract.arrays import count_ids, count_logprobs
from proxy.database.lifecycle import TrainingState
from proxy.database.migrate import current, missing_columns, newest, opened
from proxy.database.tables import ClaimedSessionRow, ClaimRow, PolicyVersionRow, SessionRow, TurnRow

_SHOWN = 5
_PAGE = 500
_LEASED, _COMMITTED = "leased", "committed"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of thing that is wrong: how often, and the first few it is about."""

    name: str
    detail: str
    count: int
    examples: list[str]


def check(url: str) -> list[Finding]:
    """What is wrong; nothing where all is well. Raises ConfigurationError and StoreUnavailable like
    `migrate.upgrade` where the store cannot be looked at."""
    revision = current(url)
    if revision != newest():
        detail = f"the store is at revision {revision or 'none'}, and this base-rl works with {newest()}"
        remedy = (
            "upgrade it: base-rl db upgrade" if revision is None or revision < newest() else "use a newer base-rl"
        )
        return [Finding(name="revision", detail=f"{detail}; {remedy}", count=1, examples=[])]
    with opened(url) as connection:
        missing = missing_columns(connection)
        if missing:
            return [_finding("schema", "tables or columns are missing: restore the store from a backup", missing)]
        findings = [*_integrity(connection)]
        for name, detail, statement in _ACCOUNTS:
            found = [str(row[0]) for row in connection.execute(statement)]
            if found:
                findings.append(_finding(name, detail, found))
        torn = list(_torn_turns(connection))
        if torn:
            findings.append(_finding("arrays", "turns whose tokens and log-probabilities do not fit together", torn))
    return findings


def _finding(name: str, detail: str, found: list[str]) -> Finding:
    return Finding(name=name, detail=detail, count=len(found), examples=found[:_SHOWN])


def _integrity(connection: Connection) -> Iterator[Finding]:
    """What SQLite finds in its file; PostgreSQL looks after its own (data checksums, amcheck)."""
    if connection.dialect.name != "sqlite":
        return
    damage = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check") if row[0] != "ok"]
    if damage:
        yield _finding("integrity", "SQLite finds damage: restore the store from a backup", damage)
    orphans = [f"{row[0]} {row[1]}" for row in connection.exec_driver_sql("PRAGMA foreign_key_check")]
    if orphans:
        yield _finding("references", "rows refer to others that are not there", orphans)


def _accounts() -> Iterator[tuple[str, str, Select[Any]]]:
    committed = (
        select(func.count())
        .select_from(ClaimedSessionRow)
        .join(ClaimRow, ClaimRow.id == ClaimedSessionRow.claim_id)
        .where(ClaimedSessionRow.session_id == SessionRow.id, ClaimRow.state == _COMMITTED)
        .scalar_subquery()
    )
    consumed = SessionRow.training == TrainingState.CONSUMED.value
    yield (
        "consumed once",
        "sessions are consumed, and not in exactly one committed claim",
        select(SessionRow.id).where(consumed, committed != 1).order_by(SessionRow.id),
    )
    yield (
        "consumed",
        "sessions are in a committed claim, and not consumed",
        select(SessionRow.id)
        .join(ClaimedSessionRow, ClaimedSessionRow.session_id == SessionRow.id)
        .join(ClaimRow, ClaimRow.id == ClaimedSessionRow.claim_id)
        .where(ClaimRow.state == _COMMITTED, ~consumed)
        .order_by(SessionRow.id),
    )
    yield (
        "leased",
        "sessions are leased, and their claim is not",
        select(SessionRow.id)
        .join(ClaimRow, ClaimRow.id == SessionRow.claim_id, isouter=True)
        .where(
            SessionRow.training == TrainingState.LEASED.value, or_(ClaimRow.id.is_(None), ClaimRow.state != _LEASED)
        )
        .order_by(SessionRow.id),
    )
    yield (
        "committed",
        "claims are committed to a version that is not there",
        select(ClaimRow.id)
        .join(
            PolicyVersionRow,
            and_(PolicyVersionRow.run_id == ClaimRow.run_id, PolicyVersionRow.version == ClaimRow.committed_version),
            isouter=True,
        )
        .where(ClaimRow.state == _COMMITTED, PolicyVersionRow.version.is_(None))
        .order_by(ClaimRow.id),
    )
    yield (
        "lineage",
        "claims handed out sessions, and one of both is not there",
        select(ClaimedSessionRow.session_id)
        .where(
            or_(
                ~exists().where(SessionRow.id == ClaimedSessionRow.session_id),
                ~exists().where(ClaimRow.id == ClaimedSessionRow.claim_id),
            )
        )
        .order_by(ClaimedSessionRow.session_id),
    )
    turns = select(func.count()).where(TurnRow.session_id == SessionRow.id).scalar_subquery()
    yield (
        "turn counts",
        "sessions count other turns than they have",
        select(SessionRow.id)
        .where(SessionRow.erased_at.is_(None), SessionRow.turn_count != turns)
        .order_by(SessionRow.id),
    )


_ACCOUNTS = tuple(_accounts())


def _torn_turns(connection: Connection) -> Iterator[str]:
    """Every turn is looked at, a page at a time."""
    last = ""
    while True:
        rows = connection.execute(_TURNS.where(TurnRow.id > last).limit(_PAGE)).all()
        yield from (row.id for row in rows if _is_torn(row))
        if len(rows) < _PAGE:
            return
        last = rows[-1].id


_TURNS = select(
    TurnRow.id,
    TurnRow.prompt_ids,
    TurnRow.output_ids,
    TurnRow.output_logprobs,
    TurnRow.spans,
    TurnRow.prefix_tokens,
    TurnRow.prompt_token_count,
).order_by(TurnRow.id)


def _is_torn(row: Row[*tuple[Any, ...]]) -> bool:
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
