from __future__ import annotations

import json
import math
from urllib.parse import unquote_plus

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.contract.claim import TrajectoryAudit
from proxy.contract.identifiers import SessionId
from proxy.errors import InvalidRequest
from proxy.overview.curves import bucket_stride, reward_points
from proxy.overview.filters import Cursor
from proxy.overview.steps.assembly import audit_of, step_facts, stored_step_facts

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=300)


@given(REWARDS, st.integers(1, 40))
def test_with_one_session_a_point_the_moving_mean_is_that_of_the_last_window(
    rewards: list[float], window: int
) -> None:
    points = reward_points([(1, float(index), reward) for index, reward in enumerate(rewards)], window)
    for index, point in enumerate(points):
        last = rewards[max(0, index + 1 - window) : index + 1]
        assert point.sessions == index + 1
        assert math.isclose(point.moving_mean, sum(last) / len(last), abs_tol=1e-9)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=1, max_size=60), st.integers(1, 200))
def test_buckets_count_every_session_and_means_stay_within_the_rewards(
    buckets: list[tuple[int, float]], window: int
) -> None:
    points = reward_points([(count, 0.0, count * mean) for count, mean in buckets], window)
    assert points[-1].sessions == sum(count for count, _ in buckets)
    low, high = min(mean for _, mean in buckets), max(mean for _, mean in buckets)
    assert all(low - 1e-9 <= point.moving_mean <= high + 1e-9 for point in points)


@given(st.integers(0, 10_000_000))
def test_a_curve_stays_small_and_its_points_stay_in_place(sessions: int) -> None:
    stride = bucket_stride(sessions)
    assert sessions <= stride * 400
    assert stride.bit_count() == 1


@given(st.floats(allow_nan=False, allow_infinity=False), st.from_regex(r"[a-z0-9_~]+", fullmatch=True))
def test_a_cursor_survives_the_wire(at: float, key: str) -> None:
    sent = Cursor(at=at, key=key).encode()
    assert unquote_plus(sent) == sent  # as it stands in an address
    assert Cursor.decode(sent) == Cursor(at=at, key=key)


@pytest.mark.parametrize("text", ["", "x", "0x1p0", "0x1p0~", "~key", "0x1p99999~key"])
def test_an_invented_cursor_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Cursor.decode(text)
    assert refusal.value.param == "cursor"


def test_staleness_of_a_step_is_weighted_by_trained_tokens_and_leaves_out_what_was_skipped() -> None:
    facts = step_facts([_audit(10, 0.0, 0, 1.0), _audit(30, 2.0, 3, 0.0), _audit(0, 9.0, 9, 0.5)])
    assert facts.staleness_mean == 1.5
    assert facts.staleness_max == 3
    assert facts.trained_tokens == 40
    assert facts.reward_mean == 0.5


@pytest.mark.parametrize("reward", [0.25, None])
def test_the_facts_of_a_stored_audit_are_those_of_the_audit(reward: float | None) -> None:
    stored = [msgspec.to_builtins(_audit(tokens, 1.5, 3, 0.5)) | {"reward": reward} for tokens in (10, 0, 5)]
    facts, expected = stored_step_facts(json.dumps(stored)), step_facts(audit_of(stored))
    assert repr(facts) == repr(expected)  # nan is not equal to itself


def test_a_step_without_trained_tokens_says_that_it_does_not_know() -> None:
    facts = step_facts([])
    assert (facts.reward_mean, facts.staleness_mean, facts.staleness_max) == (None, None, None)


def _audit(tokens: int, staleness: float, most: int, reward: float) -> TrajectoryAudit:
    return TrajectoryAudit(
        session_id=SessionId("ses_x"),
        reward=reward,
        advantage=0.0,
        trained_tokens=tokens,
        staleness_mean=staleness,
        staleness_max=most,
        logprob_gap_mean=0.0,
        logprob_gap_max=0.0,
        ratio_min=1.0,
        ratio_median=1.0,
        ratio_max=1.0,
        clipped_share=0.0,
    )
