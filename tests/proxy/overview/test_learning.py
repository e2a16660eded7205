"""How a run that has learnt nothing explains it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.states import TrainingState
from proxy.overview.learning import ENOUGH_MOVEMENT, ENOUGH_STEPS, LearningFacts, why_not_learnt

UNEQUAL = tuple((None, float(index % 2)) for index in range(16))


def facts(**said: Any) -> LearningFacts:
    """Return the facts of a run that may have learnt, except for the given ones."""
    usual: dict[str, Any] = {
        "state": "active",
        "head_version": 10,
        "sessions": {"consumed": 640, "ready": 3},
        "open_sessions": 0,
        "rewards": UNEQUAL,
        "learning_rates": [1e-4] * 10,
        "trainer_seen": True,
        "wanted": 64,
    }
    return LearningFacts(**{**usual, **said})


NEW: dict[str, Any] = {"head_version": 0, "learning_rates": []}


def test_a_run_that_may_have_learnt_reports_nothing() -> None:
    assert why_not_learnt(facts()) == ()


@pytest.mark.parametrize(
    ("said", "reasons"),
    [
        ({**NEW, "sessions": {}, "rewards": ()}, ["no agent has made a call yet"]),
        (
            {**NEW, "sessions": {"pending": 5, "excluded": 1}, "open_sessions": 2, "rewards": ()},
            ["no session has a reward yet (3 ended without one, 2 are open, 1 is not for training"],
        ),
        ({**NEW, "sessions": {"ready": 12}}, ["12 of 64 trajectories of the first batch are ready"]),
        ({**NEW, "sessions": {"ready": 12}, "wanted": None}, []),
        (
            {**NEW, "sessions": {"ready": 12}, "wanted": None, "cut_share": 0.95},
            ["95% of the recent answers were cut"],
        ),
        ({**NEW, "sessions": {"ready": 12}, "wanted": None, "cut_share": 0.5}, []),
        ({"cut_share": 1.0}, []),  # weights have moved: the trainer was configured to train such answers
        ({**NEW, "sessions": {"leased": 64, "ready": 9}}, ["the first training step is under way"]),
        (
            {**NEW, "sessions": {"ready": 70}, "trainer_seen": False, "wanted": None},
            ["no trainer is asking for trajectories: start `base-rl train`"],
        ),
        ({**NEW, "sessions": {"ready": 70}, "state": "paused"}, ["training is paused"]),
        (
            {"rewards": [(None, 1.0)] * 20},
            ["the last 20 rewards are all 1, so every advantage is zero"],
        ),
        (
            {"rewards": [("a", 1.0)] * 8 + [("b", 0.0)] * 8},
            ["within each of the last 2 groups all rewards are equal"],
        ),
        ({"rewards": [("a", 1.0)] * 8 + [("b", 0.0)] * 7 + [("b", 1.0)]}, []),
        ({"rewards": [(None, 1.0)] * 3}, []),
        ({"learning_rates": [1e-6] * 12}, ["12 steps at a learning rate of 1e-06 cannot have moved a weight"]),
        ({"learning_rates": []}, []),
        ({**NEW, "sessions": {"ready": 70}, "has_weights": False}, ["a scripted engine answers by fixed rules"]),
        ({"head_version": ENOUGH_STEPS, "learning_rates": [1e-9]}, []),
    ],
)
def test_the_reason_is_reported(said: dict[str, Any], reasons: list[str]) -> None:
    found = why_not_learnt(facts(**said))
    assert len(found) == len(reasons)
    for sentence, beginning in zip(found, reasons, strict=True):
        assert sentence.startswith(beginning)


@given(
    st.builds(
        LearningFacts,
        state=st.sampled_from(["active", "paused"]),
        head_version=st.integers(0, 200),
        sessions=st.dictionaries(st.sampled_from([state.value for state in TrainingState]), st.integers(0, 500)),
        open_sessions=st.integers(0, 50),
        rewards=st.lists(st.tuples(st.none() | st.sampled_from("ab"), st.floats(-1, 1)), max_size=40),
        learning_rates=st.lists(st.floats(0, 1e-3), max_size=20),
        trainer_seen=st.booleans(),
        wanted=st.none() | st.integers(1, 128),
    )
)
def test_every_run_gets_sentences_and_who_trains_enough_on_unlike_rewards_none(found: LearningFacts) -> None:
    reasons = why_not_learnt(found)
    assert all(reason and reason[-1] != "." for reason in reasons)
    assert len(reasons) == len(set(reasons))
    if found.head_version == 0 and found.state == "active" and not any(found.sessions.values()):
        assert reasons[0] == "no agent has made a call yet"
    if found.head_version > 0 and sum(found.learning_rates) >= ENOUGH_MOVEMENT:
        assert not any("learning rate" in reason for reason in reasons)
