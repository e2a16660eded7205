"""Rows of sessions and of what belongs to them, for erasure and retention."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BindParameter,
    Connection,
    Select,
    bindparam,
    case,
    delete,
    distinct,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    update,
)

from proxy.contract.states import EndReason, SessionState, TrainingState
from proxy.database.chunks import chunks
from proxy.database.rows import AnyRow
from proxy.database.tables import (
    NO_CONVERSATION,
    AnswerPairRow,
    FeedbackTextRow,
    JudgementRow,
    PolicyVersionRow,
    PreferenceRow,
    RewardRow,
    RunRow,
    SessionRow,
    SessionUserRow,
    TokenAuditRow,
    TurnRow,
)

# A mark leaves these training states as they are: a trainer already has the session or has used it.
_STAYS = (TrainingState.LEASED.value, TrainingState.CONSUMED.value, TrainingState.STALE.value)
_SETTLED = (
    TrainingState.CONSUMED.value,
    TrainingState.STALE.value,
    TrainingState.EXPIRED.value,
    TrainingState.EXCLUDED.value,
)
_MAY_YET_BE_TRAINED = (TrainingState.PENDING.value, TrainingState.READY.value)


class ErasedReason(StrEnum):
    REQUESTED = "requested"
    RETENTION = "retention"


class ErasureRepository:
    """Queries that run within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    # Selecting sessions

    def named(self, name: str, *, run_id: str | None) -> list[str]:
        """Return the session with this id, or all sessions to which the client gave this name."""
        statement = select(SessionRow.id).where(or_(SessionRow.id == name, SessionRow.external_id == name))
        return self._ids(statement, run_id)

    def of_user(self, digest: bytes, *, run_id: str | None) -> list[str]:
        statement = (
            select(SessionRow.id)
            .join(SessionUserRow, SessionUserRow.session_id == SessionRow.id)
            .where(SessionUserRow.digest == digest)
        )
        return self._ids(statement, run_id)

    def _ids(self, statement: Select[str], run_id: str | None) -> list[str]:
        if run_id is not None:
            statement = statement.where(SessionRow.run_id == run_id)
        return list(self._connection.execute(statement.order_by(SessionRow.id)).scalars())

    def overdue(
        self, run_id: str, *, ended_before: float | None, beyond: int | None, unconsumed: bool, limit: int
    ) -> list[str]:
        """Return sessions that retention may erase, those that ended first come first.

        A session is overdue if it ended before `ended_before` or is not among the `beyond` most recently ended. Open
        and leased sessions never are; sessions that may still be trained only with `unconsumed`.
        """
        kept = (SessionRow.run_id == run_id, SessionRow.erased_at.is_(None), SessionRow.ended_at.is_not(None))
        before = [ended_before] if ended_before is not None else []
        if beyond is not None:
            newest_first = select(SessionRow.ended_at).where(*kept).order_by(SessionRow.ended_at.desc())
            first_kept = self._connection.execute(newest_first.offset(beyond - 1).limit(1)).scalar_one_or_none()
            before += [first_kept] if first_kept is not None else []
        if not before:
            return []
        states = (*_SETTLED, *_MAY_YET_BE_TRAINED) if unconsumed else _SETTLED
        statement = (
            select(SessionRow.id)
            .where(*kept, SessionRow.ended_at < max(before), SessionRow.training.in_(states))
            .order_by(SessionRow.ended_at)
            .limit(limit)
        )
        return list(self._connection.execute(statement).scalars())

    # Marks of erasure

    def mark(self, session_ids: Sequence[str], reason: ErasedReason, now: float) -> dict[str, int]:
        """Mark sessions as erased, without deleting turns. Return by run how many were not marked before.

        A leased session stays in its claim, whose commit records that it was trained.
        """
        marked: dict[str, int] = {}
        for part in chunks(session_ids):
            for row in self._connection.execute(_MARK, {"ids": part, "now": now, "reason": reason.value}):
                marked[row.run_id] = marked.get(row.run_id, 0) + 1
        return marked

    def marked_since(self, since: float) -> list[AnyRow]:
        """Return id, time and reason of the sessions erased at `since` or later."""
        columns = (SessionRow.id, SessionRow.erased_at, SessionRow.erased_reason)
        statement = select(*columns).where(SessionRow.erased_at >= since)
        return list(self._connection.execute(statement).all())

    # Content

    def to_empty(self, session_ids: Sequence[str] | None, limit: int) -> list[str]:
        """Return erased sessions that have content left, all or among `session_ids`."""
        statement = select(SessionRow.id).where(SessionRow.erased_at.is_not(None), SessionRow.emptied_at.is_(None))
        if session_ids is not None:
            found: list[str] = []
            for part in chunks(session_ids):
                found += self._connection.execute(statement.where(SessionRow.id.in_(part))).scalars()
                if len(found) >= limit:
                    break
            return found[:limit]
        return list(self._connection.execute(statement.order_by(SessionRow.erased_at).limit(limit)).scalars())

    def empty(self, session_ids: Sequence[str], *, turns: int, now: float) -> int:
        """Delete content of erased sessions, of at most `turns` turns. Return how many sessions have none left."""
        of_these = {"ids": list(session_ids)}
        turn_ids = list(self._connection.execute(_FULL_TURNS.limit(turns), of_these).scalars())
        if turn_ids:
            self._connection.execute(_EMPTY_TURNS, {"turns": turn_ids})
        self._connection.execute(_EMPTY_REWARDS, of_these)
        self._connection.execute(_EMPTY_PREFERENCES, of_these)
        self._connection.execute(_DELETE_TEXTS, of_these)
        self._connection.execute(_EMPTY_JUDGEMENTS, of_these)
        self._connection.execute(_EMPTY_PAIRS, of_these)
        self._connection.execute(_DELETE_AUDITS, of_these)
        return self._connection.execute(_SEAL, {**of_these, "now": now}).rowcount

    # Account

    def account(self, session_ids: Sequence[str]) -> list[AnyRow]:
        """Count sessions, turns, erased sessions and those with content, by run, training state and version."""
        found: list[AnyRow] = []
        for part in chunks(session_ids):
            found += self._connection.execute(_ACCOUNT, {"ids": part})
        return found

    def fitted_to(self, session_ids: Sequence[str]) -> list[tuple[str, int, int]]:
        """Return (run, version, sessions) for versions fitted to some of these sessions."""
        # A fit has no claim: its sessions are listed in the version's inputs.
        wanted = set(session_ids)
        run_ids = {
            run_id
            for part in chunks(session_ids)
            for run_id in self._connection.execute(
                select(SessionRow.run_id).where(SessionRow.id.in_(part)).distinct()
            ).scalars()
        }
        of_runs = PolicyVersionRow.run_id.in_(sorted(run_ids)) & (PolicyVersionRow.version > 0)
        made = self._connection.execute(
            select(PolicyVersionRow.run_id, PolicyVersionRow.version, PolicyVersionRow.claim_ids).where(of_runs)
        ).all()
        found = []
        for run_id, version, claim_ids in made:
            if claim_ids:
                continue
            name, inputs = self._connection.execute(
                select(RunRow.name, PolicyVersionRow.inputs)
                .join(RunRow, RunRow.id == PolicyVersionRow.run_id)
                .where(PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == version)
            ).one()
            count = len(wanted.intersection(((inputs or {}).get("fit") or {}).get("sessions", ())))
            if count:
                found.append((name, version, count))
        return found


_AMONG: BindParameter[Any] = bindparam("ids", expanding=True)

_IS_OPEN = SessionRow.state == SessionState.OPEN.value

_MARK = (
    update(SessionRow)
    .where(SessionRow.id.in_(_AMONG), SessionRow.erased_at.is_(None))
    .values(
        erased_at=bindparam("now"),
        erased_reason=bindparam("reason"),
        external_id=null(),
        task=null(),
        first_message=null(),
        metadata_=null(),
        state=SessionState.ENDED.value,
        ended_at=func.coalesce(SessionRow.ended_at, bindparam("now")),
        end_reason=case(
            (_IS_OPEN, literal(EndReason.ERASED.value)),
            else_=SessionRow.end_reason,
        ),
        training=case(
            (SessionRow.training.in_(_STAYS), SessionRow.training), else_=literal(TrainingState.EXCLUDED.value)
        ),
    )
    .returning(SessionRow.run_id)
)

_FULL_TURNS = select(TurnRow.id).where(TurnRow.session_id.in_(_AMONG), TurnRow.conversation_hash != NO_CONVERSATION)

# Who answered what and when stays recorded, and how long the prompt was.
_EMPTY_TURNS = (
    update(TurnRow)
    .where(TurnRow.id.in_(bindparam("turns", expanding=True)))
    .values(
        prefix_tokens=0,
        prompt_ids=b"",
        output_ids=b"",
        output_logprobs=b"",
        spans=[],
        sampling={"max_new_tokens": 0},
        conversation_hash=NO_CONVERSATION,
        settled_hash=null(),
        tools_hash=b"",
        idempotency_key=null(),
        masked=null(),
        request_of=null(),
        messages=[],
        request={},
        response={},
    )
)

_EMPTY_REWARDS = (
    update(RewardRow)
    .where(
        RewardRow.session_id.in_(_AMONG), or_(RewardRow.comment.is_not(None), RewardRow.idempotency_key.is_not(None))
    )
    .values(comment=null(), idempotency_key=null())
)

_EMPTY_PREFERENCES = (
    update(PreferenceRow)
    .where(or_(PreferenceRow.chosen_session_id.in_(_AMONG), PreferenceRow.rejected_session_id.in_(_AMONG)))
    .values(comment=null(), idempotency_key=null())
)

# A text is content throughout: no row of it stays, as one of a reward does.
_DELETE_TEXTS = delete(FeedbackTextRow).where(FeedbackTextRow.session_id.in_(_AMONG))
# The hash would let somebody with a guess confirm the content. The rows stay, because they record what was spent. The
# unique index of scores needs different digests for the same judge, hence the row's id.
_EMPTY_JUDGEMENTS = (
    update(JudgementRow).where(JudgementRow.session_id.in_(_AMONG)).values(digest=JudgementRow.id, error=null())
)

# What judges spent on them stays recorded.
_EMPTY_PAIRS = update(AnswerPairRow).where(AnswerPairRow.session_id.in_(_AMONG)).values(response={})

_DELETE_AUDITS = delete(TokenAuditRow).where(TokenAuditRow.session_id.in_(_AMONG))

_SEAL = (
    update(SessionRow)
    .where(
        SessionRow.id.in_(_AMONG),
        SessionRow.erased_at.is_not(None),
        SessionRow.emptied_at.is_(None),
        ~exists().where(TurnRow.session_id == SessionRow.id, TurnRow.conversation_hash != NO_CONVERSATION),
    )
    .values(emptied_at=bindparam("now"))
)

_ACCOUNT = (
    select(
        RunRow.name.label("run"),
        SessionRow.training,
        SessionRow.consumed_by,
        func.count(distinct(SessionRow.id)).label("sessions"),
        func.sum(SessionRow.turn_count).label("turns"),
        func.sum(case((SessionRow.erased_at.is_not(None), 1), else_=0)).label("erased"),
        func.sum(case((SessionRow.emptied_at.is_(None), 1), else_=0)).label("with_content"),
    )
    .join(RunRow, RunRow.id == SessionRow.run_id)
    .where(SessionRow.id.in_(_AMONG))
    .group_by(RunRow.name, SessionRow.training, SessionRow.consumed_by)
)
