"""What pairs of answers show: a judge's preference under continuous looking, and guards on the same prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.gates.curves import share_curve
from proxy.gates.pair_findings import PairSample, preference_finding, shadow_finding
from proxy.settings import ReleaseSettings

PREFERENCES = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=80)


def release(**values: Any) -> ReleaseSettings:
    shadow = {"share": 0.1, "answers": 60, **values.pop("shadow", {})}
    preference = {"judge": "taste", **values.pop("preference", {})}
    return ReleaseSettings.model_validate({"policy": "gated", "shadow": shadow, "preference": preference, **values})


def judged(*preferences: float, **values: Any) -> PairSample:
    return PairSample(against=3, pairs=len(preferences), preferences=preferences, **values)


def guarded(new: list[float], old: list[float], name: str = "cut_answers") -> PairSample:
    return PairSample(against=3, pairs=len(new), new={name: tuple(new)}, old={name: tuple(old)})


def test_a_worse_candidate_is_refused_after_a_few_pairs_and_a_better_one_passes() -> None:
    lost = preference_finding(release(), judged(*[0.0] * 14))
    assert (lost.gate, lost.state) == ("preference", "failed")
    assert lost.text.startswith(
        "it is worse: the judge 'taste' prefers its answers in 0.000 of 14 pairs (between 0.0"
    )
    assert "with version 3" in lost.text
    won = preference_finding(release(), judged(*[1.0] * 14))
    assert won.state == "passed"
    assert won.evidence["better"] == 14
    assert won.evidence["curve"][-1] == (14, 0.5, *won.evidence["curve"][-1][2:])


def test_what_is_not_clear_waits_and_is_then_decided_by_the_rule() -> None:
    even = [0.0, 1.0, 0.5] * 19
    waiting = preference_finding(release(), judged(*even, unjudged=3, problem="the provider is away"))
    assert waiting.state == "waiting"
    assert waiting.text.startswith(
        "waits for a clear answer, or 60 pairs, of which the judge has answered about 57, 3 wait for it (its last"
        " attempt failed: the provider is away): the judge 'taste' prefers its answers in 0.500 of 57 pairs"
    )
    for undecided, state in (("promote", "passed"), ("reject", "failed")):
        found = preference_finding(release(preference={"undecided": undecided}), judged(*even, 0.0, 1.0, 0.5))
        assert (found.state, "no preference was found (preference.undecided)" in found.text) == (state, True)
    assert preference_finding(release(), judged()).text == (
        "waits for a clear answer, or 60 pairs, of which the judge has answered about 0"
    )


def test_a_judge_that_chooses_by_the_order_decides_nothing_and_is_named() -> None:
    found = preference_finding(release(preference={"undecided": "reject"}), judged(inconsistent=60))
    assert found.state == "failed", "by the rule"
    assert "the judge 'taste' chose by their order in all of 60 pairs, which therefore do not count" in found.text
    some = preference_finding(release(), judged(*[1.0] * 14, inconsistent=9))
    assert some.text.endswith("; 9 more do not count, because the judge chose by their order")
    assert preference_finding(release(), judged(inconsistent=59)).state == "waiting"


@given(PREFERENCES)
@settings(max_examples=60, deadline=None)
def test_exchanging_the_two_sides_mirrors_the_bounds(preferences: list[float]) -> None:
    one = preference_finding(release(), judged(*preferences)).evidence
    other = preference_finding(release(), judged(*[1 - each for each in preferences])).evidence
    assert one["low"] == pytest.approx(1 - other["high"])
    assert (one["better"], one["worse"]) == (other["worse"], other["better"])


@given(PREFERENCES)
@settings(max_examples=60, deadline=None)
def test_a_conclusion_stands_however_the_judge_goes_on(preferences: list[float]) -> None:
    """Bounds tighten only, so a version that was refused is refused with more pairs too."""
    states = [preference_finding(release(), judged(*preferences[:count])).evidence for count in (20, 40, 80)]
    assert [each["high"] for each in states] == sorted((each["high"] for each in states), reverse=True)
    curve = share_curve(preferences, 0.05, centre=0.5)
    assert not curve or curve[-1][2] == pytest.approx(states[-1]["low"] - 0.5, abs=1e-5)


def test_an_equal_candidate_is_seldom_refused_although_each_pair_is_looked_at() -> None:
    """The error rate: of 200 candidates as good as the serving version, at most 5 % may be refused at any of 60 looks
    (plus three standard deviations of the count)."""
    rng, runs, wrong = np.random.default_rng(0), 200, 0
    for _ in range(runs):
        values = rng.choice([0.0, 0.5, 1.0], 60, p=[0.35, 0.3, 0.35]).tolist()
        wrong += any(high < 0 for _, _, _, high in share_curve(values, 0.05, centre=0.5))
    assert wrong <= runs * 0.05 + 3 * (runs * 0.05 * 0.95) ** 0.5


def test_a_candidate_that_loses_three_of_four_is_found_among_two_hundred_pairs() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        values = (rng.random(200) < 0.25).astype(float).tolist()
        assert preference_finding(release(shadow={"answers": 200}), judged(*values)).state == "failed"


def test_the_shadow_waits_for_its_answers_and_passes_if_nothing_guarded_is_higher() -> None:
    few = shadow_finding(release(), guarded([0.0] * 20, [0.0] * 20))
    assert (few.state, few.text) == (
        "waiting",
        "waits for 60 unseen answers, 20 now; the candidate answers while its engine has no calls"
        " (shadow.busy_share): nothing that is guarded is higher by more than its bound",
    )
    none = shadow_finding(release(), PairSample(against=3)).text
    assert none == (
        "waits for 60 unseen answers, 0 now; the candidate answers while its engine has no calls (shadow.busy_share)"
    )
    busy = shadow_finding(release(shadow={"busy_share": 0.5}), PairSample(against=3)).text
    assert "while calls hold at most 0.5 of its engine's slots" in busy
    assert shadow_finding(release(), guarded([0.0] * 60, [0.0] * 60)).state == "passed"


def test_a_guard_that_is_surely_higher_on_the_same_prompts_refuses_before_all_answers_are_there() -> None:
    found = shadow_finding(release(), guarded([1.0] * 40, [0.0] * 40))
    assert found.state == "failed"
    assert found.text.startswith("share of answers cut at their bound on tokens is 1.000, and 0.000 of version 3")
    assert "surely higher by more than 0.2 (40 answers to the same prompts)" in found.text
    # Not surely: it waits, and after all answers nothing is proven.
    unsure = ([1.0, 0.0, 0.0] * 20, [0.0] * 60)
    assert shadow_finding(release(shadow={"answers": 100}), guarded(*unsure)).state == "waiting"


def test_pairs_show_a_rise_that_two_samples_of_sessions_would_not() -> None:
    """Half of all prompts lead to cut answers, whoever answers: only the difference on the same prompt counts."""
    old = [1.0, 0.0] * 50
    new = [1.0, 1.0] * 50
    found = shadow_finding(release(), guarded(new, old))
    assert found.state == "failed"
    assert found.evidence["guards"]["cut_answers"]["low"] > 0.2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"shadow": {"share": 0.0}}, "set shadow.share as well"),
        ({"shadow": {"answers": 0}}, "shadow.answers"),
        ({"preference": {"judge": "taste", "max_loss": 0.6}}, "preference.max_loss"),
    ],
)
def test_settings_that_decide_nothing_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        release(**change)
