"""The version with which a fall of the reward began."""

from __future__ import annotations

from proxy.gates.change_point import first_fallen
from proxy.gates.findings import Arm
from proxy.settings import ReleaseSettings

RELEASE = ReleaseSettings.model_validate({"rollback": {"max_drop": 0.1, "window": 6, "predecessors": 8}})


def arms(*means: float) -> list[Arm]:
    """Return versions of ten sessions each with these mean rewards, the newest first."""
    return [
        Arm(versions=(len(means) - index,), rewards=(1.0,) * round(10 * mean) + (0.0,) * round(10 * (1 - mean)))
        for index, mean in enumerate(means)
    ]


def test_a_sudden_fall_began_where_it_is_proven() -> None:
    assert first_fallen(RELEASE, arms(0.4, 0.4, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9), proven=1) == 1


def test_a_gradual_fall_began_before_the_last_version() -> None:
    assert first_fallen(RELEASE, arms(0.2, 0.4, 0.6, 0.7, 0.9, 0.9, 0.9, 0.9), proven=0) == 3


def test_it_is_looked_for_within_the_window_alone() -> None:
    assert first_fallen(RELEASE, arms(*[0.2] * 9, *[0.9] * 8), proven=0) == 5, "the last of the window"


def test_what_is_proven_stays_whatever_the_rewards_say() -> None:
    """A guard may prove it."""
    assert first_fallen(RELEASE, arms(1.0, 1.0, 0.8, 0.8, 0.8), proven=1) == 1


def test_versions_without_rewards_and_a_run_of_two_versions() -> None:
    assert first_fallen(RELEASE, arms(0.2, 0.9), proven=0) == 0
    assert first_fallen(RELEASE, [Arm(versions=(1,), rewards=()), Arm(versions=(0,), rewards=())], proven=0) == 0
