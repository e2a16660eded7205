"""The end of a session, and the reasons why sessions and turns are trained or not.

Pure, so that the store, the API and the admin page share one set of rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from proxy.contract.claim import SUPERSEDED, AnswerFault, SkipReason
from proxy.contract.states import EndReason, Outcome, SessionState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import TurnPlace, TurnState, abandoned_turns


class Ending(NamedTuple):
    """A request to end a session."""

    reason: EndReason
    outcome: Outcome | None = None


class SessionEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and how a session has ended. `reason` is None while it is open."""

    reason: EndReason | None = None
    outcome: Outcome | None = None


def ended(before: SessionEnd, ending: Ending) -> SessionEnd:
    """Return the session's end after a request to end it.

    The first request ends it and sets the reason. A later one only adds a missing outcome, because runners post the
    reward first and the outcome afterwards. `cancelled` is not added to a session that a final reward ended: the
    attempt was complete, and a runner that cleans up afterwards cancels nothing.
    """
    if before.reason is None:
        return SessionEnd(reason=ending.reason, outcome=before.outcome or ending.outcome)
    if before.outcome is not None or ending.outcome is None:
        return before
    if before.reason is EndReason.REWARD and ending.outcome is Outcome.CANCELLED:
        return before
    return msgspec.structs.replace(before, outcome=ending.outcome)


# States that only claims and commits change; settling a session leaves them as they are.
OUT_OF_OUR_HANDS = frozenset({TrainingState.LEASED, TrainingState.CONSUMED, TrainingState.STALE})


class SessionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that decide a session's training state.

    `teaches`: at least one turn can be trained (`trainable.teaching_sessions`). `barred`: the session was erased, or
    imported without being meant for training.
    """

    purpose: Purpose
    state: SessionState
    training: TrainingState
    outcome: Outcome | None
    turn_count: int
    rewarded: bool
    teaches: bool = True
    barred: bool = False

    @property
    def is_decided_elsewhere(self) -> bool:
        """Whether neither turns nor rewards can change the training state."""
        fixed = self.training in OUT_OF_OUR_HANDS or self.barred or self.purpose is Purpose.EVAL
        return fixed or self.state is SessionState.OPEN or self.turn_count == 0


def training_state(facts: SessionFacts) -> TrainingState:
    """Return the training state, as far as the session's own facts decide it."""
    if facts.training in OUT_OF_OUR_HANDS:
        return facts.training
    if facts.barred or facts.purpose is Purpose.EVAL:
        return TrainingState.EXCLUDED
    if facts.state is SessionState.OPEN:
        return TrainingState.PENDING
    given_up = facts.outcome in (Outcome.FAILED, Outcome.CANCELLED) and not facts.rewarded
    if facts.turn_count == 0 or not facts.teaches or given_up:
        return TrainingState.EXCLUDED
    if facts.rewarded:
        return TrainingState.READY
    return TrainingState.EXPIRED if facts.training is TrainingState.EXPIRED else TrainingState.PENDING


class TurnFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that decide whether a turn can be trained. `place` is its position in the session's tree."""

    place: TurnPlace
    is_greedy: bool


def untrained_turns(
    turns: Sequence[TurnFacts], purpose: Purpose, masked: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the turns that are not trained, by id, each with the reason as a clause: "it was drawn greedily".

    `masked` has the step's reasons for the turns that it left out. The result is empty for an evaluation, whose turns
    are never trained.
    """
    if purpose is Purpose.EVAL:
        return {}
    abandoned = abandoned_turns(turn.place for turn in turns)
    found: dict[str, str] = {}
    for turn in turns:
        turn_id = turn.place.id
        if turn.place.state is TurnState.FAILED:
            found[turn_id] = "the call failed"
        elif turn_id in abandoned:
            found[turn_id] = "it was abandoned: the agent left before it had this answer, and continued without it"
        elif turn.is_greedy:
            found[turn_id] = "it was drawn greedily, so there was no choice to learn from"
        elif masked and turn_id in masked and turn.place.state is TurnState.SHADOW:
            found[turn_id] = "it is a shadow answer, and has no reward of its own"
        elif masked and turn_id in masked:
            found[turn_id] = _MASKED.get(masked[turn_id], f"the trainer left it out ({masked[turn_id]})")
    return found


# Explanations of the trainer's reasons for leaving a turn out (`contract.claim.MaskedTurn`).
_MASKED: Mapping[str, str] = {
    AnswerFault.LENGTH: "it was cut by its bound on tokens",
    AnswerFault.INTERRUPTED: "it was cut when its client left, or when the generation was ended",
    AnswerFault.REPETITION: "a filter found it repetitive",
    AnswerFault.GIBBERISH: "a filter found it to be gibberish",
    AnswerFault.SAMPLING: (
        "it was drawn with top_p, top_k or min_p, and the engine does not say how much they cut off"
    ),
    SUPERSEDED: "the agent went on with another answer to this prompt, and this one has no reward of its own",
}


class SessionStanding(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that explain a session's training state.

    `skipped` is the reason why the step that consumed the session learnt nothing from it; None if it learnt, or if
    only the session's row was read.
    """

    training: TrainingState
    state: SessionState
    purpose: Purpose
    outcome: Outcome | None
    turn_count: int
    teaches: bool
    consumed_by: int | None = None
    is_erased: bool = False
    is_held_back: bool = False
    skipped: str | None = None


def standing_of(row: Any, *, teaches: bool, skipped: str | None = None) -> SessionStanding:
    """Return the standing of a session from its row. `teaches`: at least one of its turns can be trained."""
    return SessionStanding(
        training=TrainingState(row.training),
        state=SessionState(row.state),
        purpose=Purpose(row.purpose),
        outcome=Outcome(row.outcome) if row.outcome is not None else None,
        turn_count=row.turn_count,
        teaches=teaches,
        consumed_by=row.consumed_by,
        is_erased=row.erased_at is not None,
        is_held_back=row.held_back,
        skipped=skipped,
    )


def explanation(standing: SessionStanding) -> str:
    """Return a sentence that says why the session is or is not trained, and what would change it."""
    match standing.training:
        case TrainingState.CONSUMED if standing.skipped is not None:
            why = _SKIPPED.get(standing.skipped, standing.skipped.replace("_", " "))
            return f"Version {standing.consumed_by} consumed it and learnt nothing from it: {why}."
        case TrainingState.CONSUMED:
            return f"It was trained: version {standing.consumed_by} learnt from it."
        case TrainingState.EXCLUDED:
            return _why_excluded(standing)
        case TrainingState.PENDING if standing.state is SessionState.OPEN:
            if standing.turn_count and not standing.teaches:
                return f"It is open. {_NO_TURN} It is trained only if a call succeeds, and it ends with a reward."
            return "It is open; it is trained once it has ended and has a reward."
        case other:
            return _SENTENCES[other]


_NO_TURN = "No turn of it can be trained: the calls failed, were abandoned by the agent, or were drawn greedily."

# Explanations of the trainer's reasons for skipping a session; any other reason is shown as it is.
_SKIPPED: Mapping[str, str] = {
    SkipReason.TRUNCATED: "its answers were cut",
    SkipReason.REPETITION: "a filter found its answers repetitive",
    SkipReason.GIBBERISH: "a filter found its answers to be gibberish",
    SkipReason.SAMPLING: "its answers were drawn with top_p, top_k or min_p, which no engine says the effect of",
    SkipReason.NO_SIGNAL: "nothing in its batch was better or worse than the rest",
}

_SENTENCES = {
    TrainingState.PENDING: "It ended and waits for a reward (POST /v1/feedback).",
    TrainingState.READY: "It ended and has feedback: the trainer takes it next.",
    TrainingState.LEASED: "A trainer has it in the current step; it returns if the step does not commit.",
    TrainingState.STALE: "When a trainer asked, the policy had moved too far on from the versions that produced it.",
    TrainingState.EXPIRED: "It ended and no reward came in time; a reward posted now still makes it trainable.",
}


def _why_excluded(standing: SessionStanding) -> str:
    if standing.is_erased:
        return "It was erased before it was trained."
    if standing.is_held_back:
        return "It is left out of training: imported only to be looked at, or from a version that was rolled back."
    if standing.purpose is Purpose.EVAL:
        return "Its purpose is eval: recorded and scored, never trained."
    if standing.turn_count == 0:
        return "It ended without a model call."
    if standing.teaches and standing.outcome in (Outcome.FAILED, Outcome.CANCELLED):
        return f"It ended as {standing.outcome} without a reward; a reward posted now still makes it trainable."
    return _NO_TURN
