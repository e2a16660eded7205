from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.contract.trajectory import Purpose
from proxy.database.lifecycle import (
    OUT_OF_OUR_HANDS,
    LedgerEntry,
    Outcome,
    SessionFacts,
    SessionState,
    TrainingState,
    combine,
    training_state,
)

entries = st.builds(
    LedgerEntry,
    turn_id=st.none(),
    name=st.sampled_from(["reward", "format", "speed"]),
    source=st.sampled_from(["api", "judge"]),
    value=st.integers(-1000, 1000).map(float),
)
weights = st.dictionaries(st.sampled_from(["reward", "format", "unused"]), st.integers(-3, 3).map(float))


@given(st.lists(entries, min_size=1), weights)
def test_the_reward_is_the_weighted_sum_of_what_stands(ledger: list[LedgerEntry], by_name: dict[str, float]) -> None:
    expected = 0.0
    for name in ("reward", "format", "speed"):
        for source in ("api", "judge"):
            values = [entry.value for entry in ledger if (entry.name, entry.source) == (name, source)]
            if values:
                expected += by_name.get(name, 1.0) * values[-1]
    assert combine(ledger, by_name) == expected


@given(st.lists(entries), weights)
def test_only_an_empty_ledger_has_no_reward(ledger: list[LedgerEntry], by_name: dict[str, float]) -> None:
    combined = combine(ledger, by_name)
    assert (combined is None) == (not ledger)
    assert combined is None or math.isfinite(combined)


@given(st.lists(entries, min_size=1), st.lists(entries), weights)
def test_saying_the_same_again_changes_nothing(
    ledger: list[LedgerEntry], later: list[LedgerEntry], by_name: dict[str, float]
) -> None:
    """Entries that are superseded anyway may be dropped or kept."""
    whole = ledger + later
    standing = list({(entry.name, entry.source): entry for entry in whole}.values())
    assert combine(whole, by_name) == combine(standing, by_name) == combine(whole + standing, by_name)


facts = st.builds(
    SessionFacts,
    purpose=st.sampled_from(Purpose),
    state=st.sampled_from(SessionState),
    training=st.sampled_from(TrainingState),
    outcome=st.none() | st.sampled_from(Outcome),
    turn_count=st.integers(0, 3),
    rewarded=st.booleans(),
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
    )
    assert (training_state(given_facts) is TrainingState.READY) == should


@given(facts)
def test_what_the_trainer_holds_is_left_alone_and_settling_twice_is_once(given_facts: SessionFacts) -> None:
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
