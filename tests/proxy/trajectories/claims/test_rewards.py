from __future__ import annotations

from proxy.contract.identifiers import TurnId
from proxy.trajectories.claims.rewards import NumberedEntry, handed_rewards


def entry(number: int, value: float, *, turn: str | None = None, name: str = "reward") -> NumberedEntry:
    return NumberedEntry(id=f"rwd_{number}", turn_id=turn, name=name, source="api", value=value)


def test_the_latest_entry_counts_and_is_named() -> None:
    handed = handed_rewards([entry(1, 1.0), entry(2, 0.25)], {})
    assert handed.reward == 0.25
    assert handed.reward_ids == ("rwd_2",)


def test_names_are_weighed_and_summed() -> None:
    handed = handed_rewards([entry(1, 1.0), entry(2, 4.0, name="style")], {"style": 0.5})
    assert handed.reward == 3.0
    assert set(handed.reward_ids) == {"rwd_1", "rwd_2"}


def test_turns_have_rewards_of_their_own() -> None:
    handed = handed_rewards([entry(1, 1.0, turn="t1"), entry(2, -1.0, turn="t2"), entry(3, 2.0, turn="t1")], {})
    assert handed.reward is None
    assert handed.turn_rewards == {TurnId("t1"): 2.0, TurnId("t2"): -1.0}


def test_no_entry_is_no_reward() -> None:
    handed = handed_rewards([], {})
    assert handed.reward is None
    assert handed.turn_rewards == {}
