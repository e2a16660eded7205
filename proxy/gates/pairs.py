"""Read a candidate's pairs of answers as a sample for the gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, func, select

from proxy.bounded_cache import BoundedCache
from proxy.contract.turn import TurnState
from proxy.database.chunks import chunks
from proxy.database.rows import AnyRow
from proxy.database.tables import AnswerPairRow, JobRow, SessionRow, TurnRow
from proxy.gates.evidence import TOKEN_BYTES, guard_settings, guarded_values
from proxy.gates.findings import guard_bounds
from proxy.gates.pair_findings import PairSample
from proxy.runs.service import RunView
from proxy.versions.answer_pairs import PREFERRING, most_pairs

# Pairs whose guarded values are remembered, some hundred bytes each: several candidates of several runs.
_REMEMBERED = 20_000

_Values = tuple[Mapping[str, float], Mapping[str, float]]


class AnswerPairSamples:
    """Reads samples of pairs. The values of a pair do not change, so they are computed once."""

    def __init__(self) -> None:
        self._values: BoundedCache[tuple[str, str], _Values] = BoundedCache(_REMEMBERED)

    def read(self, connection: Connection, run: RunView, version: int, against: int) -> PairSample:
        """Return the pairs of the candidate `version` and the serving version `against`, without those of erased
        sessions."""
        release = run.settings.release
        rows = _rows(connection, run.id, version, against, most_pairs(run))
        # The first ones, because a test must keep the values that it has seen, and as many for all candidates.
        guarded = rows[: release.shadow.answers]
        values = self._guarded(connection, run, [row.id for row in guarded])
        both = [values[row.id] for row in guarded]
        names = guard_bounds(release.guards)
        judged = [row for row in rows if row.preference is not None and row.judge == release.preference.judge]
        judged.sort(key=lambda row: (row.judged_at, row.id))
        unjudged = [row.id for row in rows if row.state == TurnState.COMPLETE.value and row.preference is None]
        return PairSample(
            against=against,
            pairs=len(guarded),
            failed=sum(row.state == TurnState.FAILED.value for row in guarded),
            new={name: tuple(new[name] for new, _ in both) for name in names},
            old={name: tuple(old[name] for _, old in both) for name in names},
            preferences=tuple(row.preference for row in judged if row.is_consistent),
            inconsistent=sum(not row.is_consistent for row in judged),
            unjudged=len(unjudged),
            problem=_problem(connection, unjudged) if release.preference.judge is not None else None,
        )

    def _guarded(self, connection: Connection, run: RunView, pair_ids: Sequence[str]) -> dict[str, _Values]:
        """Return the guarded values of the candidate's and the serving version's answer by pair."""
        settings, found = guard_settings(run), dict[str, _Values]()
        for each in pair_ids:
            if (values := self._values.get((each, settings))) is not None:
                found[each] = values
        unknown = [each for each in pair_ids if each not in found]
        old = {row.pair_id: row for row in _in_parts(connection, _SERVED, unknown)}
        for row in _in_parts(connection, _UNSEEN, unknown):
            found[row.pair_id] = guarded_values([row], run), guarded_values([old[row.pair_id]], run)
            self._values.put((row.pair_id, settings), found[row.pair_id])
        return found


def _rows(connection: Connection, run_id: str, version: int, against: int, most: int) -> list[AnyRow]:
    """Return the first `most` pairs, in the order in which they were recorded."""
    statement = (
        select(
            AnswerPairRow.id,
            AnswerPairRow.state,
            AnswerPairRow.judge,
            AnswerPairRow.preference,
            AnswerPairRow.is_consistent,
            AnswerPairRow.judged_at,
        )
        .join(SessionRow, SessionRow.id == AnswerPairRow.session_id)
        .where(
            AnswerPairRow.run_id == run_id,
            AnswerPairRow.version == version,
            AnswerPairRow.against == against,
            SessionRow.erased_at.is_(None),
        )
    )
    return list(connection.execute(statement.order_by(AnswerPairRow.created_at, AnswerPairRow.id).limit(most)))


def _problem(connection: Connection, pair_ids: Sequence[str]) -> str | None:
    """Return why the judge did not compare one of these pairs; None if no attempt has failed."""
    for part in chunks(pair_ids):
        failed = select(JobRow.error).where(
            JobRow.kind == PREFERRING, JobRow.key.in_(part), JobRow.error.is_not(None)
        )
        if (error := connection.execute(failed.order_by(JobRow.due_at.desc()).limit(1)).scalar()) is not None:
            return str(error)
    return None


def _in_parts(connection: Connection, statement: Select[*tuple[Any, ...]], pair_ids: Sequence[str]) -> list[AnyRow]:
    found: list[AnyRow] = []
    for part in chunks(pair_ids):
        found += connection.execute(statement.where(AnswerPairRow.id.in_(part)))
    return found


# Both with the names of `GateRepository.calls`.
_UNSEEN = select(
    AnswerPairRow.id.label("pair_id"),
    AnswerPairRow.state,
    AnswerPairRow.finish_reason,
    (AnswerPairRow.output_tokens * TOKEN_BYTES).label("output_bytes"),
    AnswerPairRow.seconds,
    AnswerPairRow.response,
)
_SERVED = select(
    AnswerPairRow.id.label("pair_id"),
    TurnRow.state,
    TurnRow.finish_reason,
    func.length(TurnRow.output_ids).label("output_bytes"),
    (TurnRow.finished_at - TurnRow.started_at).label("seconds"),
    TurnRow.response,
).join(TurnRow, TurnRow.id == AnswerPairRow.turn_id)
