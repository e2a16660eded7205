from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.contract.states import Outcome, SessionState, TrainingState
from proxy.contract.trajectory import Purpose
from proxy.lifecycle.outcomes import OUT_OF_OUR_HANDS, SessionFacts, training_state

facts = st.builds(
    SessionFacts,
    purpose=st.sampled_from(Purpose),
    state=st.sampled_from(SessionState),
    training=st.sampled_from(TrainingState),
    outcome=st.none() | st.sampled_from(Outcome),
    turn_count=st.integers(0, 3),
    rewarded=st.booleans(),
    teaches=st.booleans(),
)


@given(facts)
def test_readiness_needs_an_end_a_reward_a_turn_and_the_purpose(given_facts: SessionFacts) -> None:
    free = given_facts.training not in OUT_OF_OUR_HANDS
    should = (
        free
        and given_facts.purpose is Purpose.TRAIN
        and given_facts.state is SessionState.ENDED
        and given_facts.rewarded
        and given_facts.turn_count > 0
        and given_facts.teaches
    )
    assert (training_state(given_facts) is TrainingState.READY) == should


@given(facts)
def test_leased_sessions_do_not_change_and_settling_is_idempotent(given_facts: SessionFacts) -> None:
    settled = training_state(given_facts)
    if given_facts.training in OUT_OF_OUR_HANDS:
        assert settled is given_facts.training
    else:
        assert settled not in OUT_OF_OUR_HANDS
    assert training_state(replace(given_facts, training=settled)) is settled


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_a_failure_is_trained_only_if_rewarded(outcome: Outcome) -> None:
    unrewarded = SessionFacts(
        purpose=Purpose.TRAIN,
        state=SessionState.ENDED,
        training=TrainingState.PENDING,
        outcome=outcome,
        turn_count=1,
        rewarded=False,
    )
    assert training_state(unrewarded) is TrainingState.EXCLUDED
