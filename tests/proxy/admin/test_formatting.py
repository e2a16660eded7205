from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.admin import formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (1234567, "1 234 567"),
        (0.5, "0.50"),
        (-0.25, "−0.25"),
        (-0.001, "0.00"),
        (float("nan"), "–"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert formatting.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (1.0, "1"), (0.0, "0"), (0.25, "0.25"), (-1 / 3, "−0.333"), (-0.0001, "0")]
)
def test_rewards(value: float | None, text: str) -> None:
    assert formatting.reward(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (7.25, "7.25"), (950, "950"), (999.9, "1k"), (1250, "1.25k"), (3_400_000, "3.4M")]
)
def test_compact_numbers(value: float, text: str) -> None:
    assert formatting.compact(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0344, "34 ms"), (0.9999, "1.00 s"), (1.32, "1.32 s"), (45.2, "45 s"), (60, "1 min"),
        (125, "2 min 5 s"), (3599.9, "1 h"), (11_520, "3 h 12 min"), (90_000, "1 d 1 h"), (-3, "0 ms"),
    ],
)  # fmt: skip
def test_durations(value: float, text: str) -> None:
    assert formatting.seconds(value) == text


@pytest.mark.parametrize(
    ("passed", "text"),
    [(-5, "just now"), (1, "just now"), (12, "12 s ago"), (61, "1 min ago"), (7300, "2 h ago"), (2e5, "2 d ago")],
)
def test_ages(passed: float, text: str) -> None:
    assert formatting.ago(1000.0, 1000.0 + passed) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12 B"), (1536, "1.5 KiB"), (1_468_928, "1.4 MiB"), (None, "–")])
def test_sizes(value: int | None, text: str) -> None:
    assert formatting.size(value) == text


@given(st.floats(-1e9, 0))
def test_heat_has_nine_steps_and_grows_with_surprise(logprob: float) -> None:
    assert 0 <= formatting.heat(logprob) <= 8
    assert formatting.heat(logprob) <= formatting.heat(logprob - 1.0)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_number_has_a_text(value: float) -> None:
    for write in (formatting.number, formatting.reward, formatting.compact):
        assert write(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("/home/me/models/calculator/checkpoint", "…/calculator/checkpoint"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("checkpoint", "checkpoint"),
        ("", ""),
    ],
)
def test_models(name: str, text: str) -> None:
    assert formatting.model(name) == text
