from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.states import EndReason, Outcome, SessionState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.contract.turn import TurnPlace, TurnState
from proxy.lifecycle.outcomes import (
    Ending,
    SessionEnd,
    SessionStanding,
    TurnFacts,
    ended,
    explanation,
    untrained_turns,
)

endings = st.builds(Ending, st.sampled_from(EndReason), st.none() | st.sampled_from(Outcome))


@given(st.lists(endings, min_size=1, max_size=6))
def test_the_first_ending_decides_and_later_ones_revoke_nothing(asked: list[Ending]) -> None:
    last = SessionEnd()
    for ending in asked:
        after = ended(last, ending)
        assert after.reason is asked[0].reason
        assert last.outcome is None or after.outcome is last.outcome
        assert ended(after, ending) == after, "the same request again changes nothing"
        last = after
    said = [ending.outcome for ending in asked if ending.outcome is not None]
    if asked[0].reason is EndReason.REWARD and asked[0].outcome is None:
        said = [outcome for outcome in said if outcome is not Outcome.CANCELLED]
    assert last.outcome is (said[0] if said else None)


@given(st.lists(endings, min_size=1, max_size=6))
def test_a_session_that_a_reward_ended_is_never_cancelled(asked: list[Ending]) -> None:
    first = ended(SessionEnd(), Ending(EndReason.REWARD))
    assert reduce(ended, asked, first).outcome is not Outcome.CANCELLED


@pytest.mark.parametrize(
    ("said", "outcome"), [(Outcome.CANCELLED, None), (Outcome.FAILED, Outcome.FAILED), (None, None)]
)
def test_a_runner_may_cancel_after_the_reward_without_effect(said: Outcome | None, outcome: Outcome | None) -> None:
    rewarded = ended(SessionEnd(), Ending(EndReason.REWARD))
    assert ended(rewarded, Ending(EndReason.EXPLICIT, said)) == SessionEnd(reason=EndReason.REWARD, outcome=outcome)


standings = st.builds(
    SessionStanding,
    training=st.sampled_from(TrainingState),
    state=st.sampled_from(SessionState),
    purpose=st.sampled_from(Purpose),
    outcome=st.none() | st.sampled_from(Outcome),
    turn_count=st.integers(0, 2),
    teaches=st.booleans(),
    consumed_by=st.just(3),
    is_erased=st.booleans(),
    is_held_back=st.booleans(),
)


@given(standings)
def test_only_a_session_with_a_trainable_turn_is_promised_to_be_trained(standing: SessionStanding) -> None:
    said = explanation(standing)
    assert said.endswith((".", ")."))
    if standing.training is TrainingState.EXCLUDED and not standing.teaches:
        assert "makes it trainable" not in said
    if standing.training is TrainingState.PENDING and standing.state is SessionState.OPEN and standing.turn_count:
        assert ("No turn of it can be trained" in said) == (not standing.teaches)


def turn(name: str, state: TurnState = TurnState.COMPLETE, *, is_greedy: bool = False) -> TurnFacts:
    return TurnFacts(place=TurnPlace(name, None, 0, 4, state), is_greedy=is_greedy)


def test_untrained_turns_have_a_reason() -> None:
    turns = [
        turn("whole"),
        turn("failed", TurnState.FAILED),
        turn("left", TurnState.TRUNCATED),
        turn("greedy", is_greedy=True),
        turn("long"),
        turn("odd"),
    ]
    masked = {"long": "length", "odd": "a reason of a newer trainer"}
    found = untrained_turns(turns, Purpose.TRAIN, masked)
    assert found == {
        "failed": "the call failed",
        "left": "it was abandoned: the agent left before it had this answer, and continued without it",
        "greedy": "it was drawn greedily, so there was no choice to learn from",
        "long": "it was cut by its bound on tokens",
        "odd": "the trainer left it out (a reason of a newer trainer)",
    }
    assert untrained_turns(turns, Purpose.EVAL, masked) == {}


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        (None, "It was trained: version 3 learnt from it."),
        ("truncated", "Version 3 consumed it and learnt nothing from it: its answers were cut."),
        ("no_reward", "Version 3 consumed it and learnt nothing from it: no reward."),
    ],
)
def test_the_explanation_reports_a_consumed_session_without_effect(skipped: str | None, said: str) -> None:
    standing = SessionStanding(
        training=TrainingState.CONSUMED,
        state=SessionState.ENDED,
        purpose=Purpose.TRAIN,
        outcome=None,
        turn_count=1,
        teaches=True,
        consumed_by=3,
        skipped=skipped,
    )
    assert explanation(standing) == said
