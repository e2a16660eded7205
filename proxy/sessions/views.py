"""The view of a session in the API."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from proxy.contract.states import TrainingState
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import TurnPlace, TurnState
from proxy.database.rows import AnyRow
from proxy.lifecycle.audits import SessionAudit
from proxy.lifecycle.outcomes import TurnFacts, explanation, standing_of, untrained_turns
from proxy.lifecycle.texts import FeedbackEntry

_LOGPROB_BYTES = 4


class TurnSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a session. `attributed_by` is the rule that attributed it to the session. `prompt_tokens` counts the
    full prompt, including tokens shared with the parent."""

    id: str
    ordinal: int
    parent_id: str | None
    finish_reason: str
    continuation: str
    state: str
    attributed_by: str
    prompt_tokens: int
    output_tokens: int
    started_at: float
    finished_at: float


class RewardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the ledger. `superseded`: a later entry about the same turn, name and source replaced it.
    `trained`: the step that consumed the session used it."""

    id: str
    turn_id: str | None
    name: str
    value: float
    source: str
    comment: str | None
    superseded: bool
    after_training: bool
    trained: bool
    created_at: float


class PreferenceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A statement that the session, or its turn `turn_id`, was `chosen` or `rejected` against another session or
    turn. A preference between two turns of one session appears as two entries with the same id."""

    id: str
    verdict: str
    turn_id: str | None
    other_session_id: str
    other_turn_id: str | None
    source: str
    comment: str | None
    created_at: float


class AttemptEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One of the sessions with the same name."""

    id: str
    attempt: int
    state: str
    training: str
    reward: float | None
    created_at: float


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session with its turns, rewards, texts (`feedback`) and preferences.

    - `attributed_by`: the origin of the session.
    - `trainable`: it is with the trainer or will be; `explanation` gives the reason in a sentence.
    - `trained_reward`: the reward that its step trained on; `reward`: the value of the ledger now. If these differ,
    for the session or a turn, `revised_at` is the time of the newest entry that was not used. - `attempt`: its number
    among the sessions with its `external_id`. These are the `attempts`, the newest hundred, newest first. A session
    without a name has neither. - `untrained_turns`: the ids of the turns that are not trained, with the reasons.
    """

    id: str
    run: str
    external_id: str | None
    group_id: str | None
    group: str | None
    task: str | None
    purpose: str
    metadata: dict[str, Any] | None
    attributed_by: str
    state: str
    outcome: str | None
    end_reason: str | None
    training: str
    trainable: bool
    explanation: str
    consumed_by: int | None
    reward: float | None
    trained_reward: float | None
    revised_at: float | None
    created_at: float
    last_active_at: float
    ended_at: float | None
    turns: tuple[TurnSummary, ...]
    rewards: tuple[RewardEntry, ...]
    feedback: tuple[FeedbackEntry, ...]
    preferences: tuple[PreferenceEntry, ...]
    attempt: int | None = None
    attempts: tuple[AttemptEntry, ...] = ()
    erased_at: float | None = None
    erased_reason: str | None = None
    untrained_turns: dict[str, str] = {}


def session_view(
    row: AnyRow,
    turns: Sequence[AnyRow],
    rewards: Sequence[AnyRow],
    feedback: tuple[FeedbackEntry, ...],
    preferences: Sequence[AnyRow],
    attempts: Sequence[AnyRow] = (),
    *,
    teaches: bool,
    audit: SessionAudit | None = None,
) -> SessionView:
    """Build the view of a session. `teaches`: at least one of its turns can be trained. `audit` is the record of the
    session in the step that consumed it."""
    masked = audit.reasons if audit is not None else {}
    training = TrainingState(row.training)
    is_trained = training is TrainingState.CONSUMED
    return SessionView(
        id=row.id,
        run=row.run_name,
        external_id=row.external_id,
        group_id=row.group_id,
        group=row.group_name,
        task=row.task,
        purpose=row.purpose,
        metadata=row.metadata,
        attributed_by=row.attributed_by,
        state=row.state,
        outcome=row.outcome,
        end_reason=row.end_reason,
        training=row.training,
        trainable=training in (TrainingState.READY, TrainingState.LEASED, TrainingState.CONSUMED),
        explanation=explanation(
            standing_of(row, teaches=teaches, skipped=audit.skipped if audit is not None else None)
        ),
        consumed_by=row.consumed_by,
        reward=row.reward,
        trained_reward=row.handed_reward if is_trained else None,
        revised_at=row.revised_at,
        created_at=row.created_at,
        last_active_at=row.last_active_at,
        ended_at=row.ended_at,
        turns=tuple(_turn(turn) for turn in turns),
        rewards=reward_entries(rewards, trained=(row.handed_ids or ()) if is_trained else ()),
        feedback=feedback,
        preferences=tuple(entry for preference in preferences for entry in _preference(row.id, preference)),
        attempt=row.attempt if row.external_id is not None else None,
        attempts=tuple(AttemptEntry(**attempt._mapping) for attempt in attempts),
        erased_at=row.erased_at,
        erased_reason=row.erased_reason,
        untrained_turns=untrained_turns([_facts(turn) for turn in turns], Purpose(row.purpose), masked),
    )


def _facts(turn: AnyRow) -> TurnFacts:
    state = TurnState(turn.state)
    return TurnFacts(
        place=TurnPlace(turn.id, turn.parent_id, turn.prefix_tokens, turn.prompt_token_count, state),
        is_greedy=turn.temperature == 0.0,
    )


def reward_entries(rows: Sequence[AnyRow], *, trained: Collection[str]) -> tuple[RewardEntry, ...]:
    """Return the entries of rows in order of arrival. The last row of each turn, name and source is in force; the
    others are superseded. `trained` are the ids that a step used."""
    in_force = {(row.turn_id, row.name, row.source): row.id for row in rows}
    return tuple(
        RewardEntry(
            id=row.id,
            turn_id=row.turn_id,
            name=row.name,
            value=row.value,
            source=row.source,
            comment=row.comment,
            superseded=in_force[row.turn_id, row.name, row.source] != row.id,
            after_training=row.after_training,
            trained=row.id in trained,
            created_at=row.created_at,
        )
        for row in rows
    )


def _preference(session_id: str, row: AnyRow) -> Iterator[PreferenceEntry]:
    chosen = (row.chosen_session_id, row.chosen_turn_id)
    rejected = (row.rejected_session_id, row.rejected_turn_id)
    for verdict, own, other in (("chosen", chosen, rejected), ("rejected", rejected, chosen)):
        if own[0] == session_id:
            yield PreferenceEntry(
                id=row.id,
                verdict=verdict,
                turn_id=own[1],
                other_session_id=other[0],
                other_turn_id=other[1],
                source=row.source,
                comment=row.comment,
                created_at=row.created_at,
            )


def _turn(row: AnyRow) -> TurnSummary:
    return TurnSummary(
        id=row.id,
        ordinal=row.ordinal,
        parent_id=row.parent_id,
        finish_reason=row.finish_reason,
        continuation=row.continuation,
        state=row.state,
        attributed_by=row.attributed_by,
        prompt_tokens=row.prompt_token_count,
        output_tokens=row.logprob_bytes // _LOGPROB_BYTES,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )
