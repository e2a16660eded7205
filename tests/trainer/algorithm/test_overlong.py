from __future__ import annotations

import pytest
import structlog.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.tiny import trajectory, turn
from trainer.algorithm.advantages import assign
from trainer.algorithm.overlong import bounded, overlong_penalty
from trainer.algorithm.parts import Algorithm
from trainer.algorithm.presets import resolve
from trainer.algorithm.running import RunningMeans
from trainer.algorithm.signal import levelled_groups
from trainer.config import AlgorithmSettings
from trainer.errors import ConfigurationError

MEANS = RunningMeans.fresh(0.9)


def dapo(**parts: object) -> Algorithm:
    return resolve(AlgorithmSettings.model_validate({"preset": "dapo", **parts}))


def as_in_the_paper(length: int, longest: int, cache: int) -> float:
    """Equation 13 of Yu et al. 2025: 0 up to longest − cache, −1 above longest, linear in between."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@given(
    longest=st.integers(2, 200),
    share=st.floats(0.01, 0.99),
    factor=st.floats(0.1, 5.0),
    lengths=st.lists(st.integers(1, 250), min_size=1, max_size=8),
)
def test_the_penalty_is_the_papers(longest: int, share: float, factor: float, lengths: list[int]) -> None:
    cache = min(max(1, round(longest * share)), longest - 1)
    algorithm = dapo(overlong_tokens=longest, overlong_tail=cache, overlong_factor=factor)
    members = [trajectory(turn([7]), turn([7] * length)) for length in lengths]
    expected = [factor * as_in_the_paper(length, longest, cache) for length in lengths]
    assert overlong_penalty(members, bounded(algorithm, None, None)).tolist() == pytest.approx(expected, abs=1e-12)


def test_the_bound_follows_the_run() -> None:
    """Answers of different lengths that a bound of 1024 penalises equally are penalised differently under 4096."""
    followed = bounded(dapo(), 4096, 32768)
    assert (followed.overlong_tokens, followed.overlong_tail) == (4096, 819)
    cases = zip((1500, 3000, 700, 500), (1.0, 1.0, 0.0, 0.0), strict=True)
    members = [trajectory(turn([7] * length), reward=reward) for length, reward in cases]
    assert assign(members, [0] * 4, followed, MEANS).session == pytest.approx((1.0, 1.0, -1.0, -1.0), abs=1e-3)
    assert levelled_groups(members, [0] * 4, followed) == 0

    fixed = bounded(dapo(overlong_tokens=1024, overlong_tail=256), 4096, 32768)
    assert assign(members, [0] * 4, fixed, MEANS).session == (0.0, 0.0, 0.0, 0.0)
    assert levelled_groups(members, [0] * 4, fixed) == 1


def test_an_answer_that_is_too_long_costs_its_session() -> None:
    members = [trajectory(turn([7] * length), reward=1.0) for length in (3, 1024)]
    assert assign(members, [0, 0], bounded(dapo(), 1024, None), MEANS).session == pytest.approx((1.0, -1.0), abs=1e-3)


def test_without_any_bound_nothing_is_penalised_and_the_log_says_so() -> None:
    with structlog.testing.capture_logs() as logs:
        unbounded = bounded(dapo(), None, None)
    assert "overlong answers are not penalised" in logs[0]["event"]
    assert unbounded.overlong_factor == 0
    assert not overlong_penalty([trajectory(turn([7] * 9999))], unbounded).any()


def test_a_preset_without_the_penalty_needs_no_bound() -> None:
    grpo = resolve(AlgorithmSettings())
    with structlog.testing.capture_logs() as logs:
        assert bounded(grpo, 64, 32) is grpo
    assert logs == []


@pytest.mark.parametrize(
    ("parts", "run", "context", "said"),
    [
        ({"overlong_tokens": 2048}, 1024, 4096, "overlong_tokens: 2048 is above run.max_new_tokens .1024."),
        ({"overlong_tokens": 512}, 1024, 512, "overlong_tokens: overlong answers are penalised up to 512"),
        (
            {},
            1024,
            512,
            "run.max_new_tokens: overlong answers .* context is 512 .* or trainer.algorithm.overlong_tok",
        ),
        ({"overlong_tail": 64}, 64, 512, "overlong_tail: 64 must be below run.max_new_tokens .64."),
        ({}, 1, 512, "overlong_tail: 1 must be below run.max_new_tokens .1."),
    ],
)
def test_a_bound_that_no_answer_reaches_is_an_error_at_start(
    parts: dict[str, int], run: int, context: int, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        bounded(dapo(**parts), run, context)
