"""Compare the measures with their definitions, computed in other ways, and check which tokens are measured."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from proxy.contract.claim import AnswerFault
from proxy.contract.turn import LogprobConvention
from tests.trainer.tiny import turn
from trainer.batching.filters import caught_by, longest_certain_run, lowest_mean_logprob, repeated_share
from trainer.config import FilterSettings

ids = st.lists(st.integers(0, 6), max_size=40)
logprobs = st.lists(st.floats(-20, 0, width=32), min_size=1, max_size=40)


@given(ids, st.integers(1, 6))
def test_the_repeated_share_counts_n_grams_that_occur_earlier(ids: list[int], n: int) -> None:
    grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    earlier = sum(gram in grams[:place] for place, gram in enumerate(grams))
    assert repeated_share(ids, n) == pytest.approx(earlier / len(grams) if grams else 0.0, abs=1e-12)


@given(ids, st.integers(1, 6), st.permutations(range(7)))
def test_repetition_does_not_depend_on_the_ids(ids: list[int], n: int, names: list[int]) -> None:
    share = repeated_share(ids, n)
    assert 0 <= share < 1
    assert repeated_share([names[each] for each in ids], n) == share


@given(st.integers(1, 8), st.integers(1, 8), st.integers(2, 30))
def test_a_loop_repeats_all_but_its_first_round(period: int, n: int, rounds: int) -> None:
    ids = list(range(period)) * rounds
    grams = len(ids) - n + 1
    if grams >= 2:
        assert repeated_share(ids, n) == pytest.approx(1 - min(period, grams) / grams)
    assert repeated_share(list(range(len(ids))), n) == 0


@given(logprobs, st.floats(0.01, 0.99))
def test_the_longest_certain_run_is_the_longest_of_all_stretches(logprobs: list[float], probability: float) -> None:
    certain = [logprob > math.log(probability) for logprob in logprobs]
    stretches = (
        end - start
        for start in range(len(certain))
        for end in range(start + 1, len(certain) + 1)
        if all(certain[start:end])
    )
    assert longest_certain_run(logprobs, probability) == max(stretches, default=0)


@given(logprobs, st.integers(1, 50))
def test_the_lowest_mean_is_the_lowest_of_all_windows(logprobs: list[float], window: int) -> None:
    size = min(window, len(logprobs))
    windows = [logprobs[start : start + size] for start in range(len(logprobs) - size + 1)]
    lowest = min(math.fsum(each) / size for each in windows)
    assert lowest_mean_logprob(logprobs, window) == pytest.approx(lowest, abs=1e-9)
    if window >= len(logprobs):
        assert lowest == pytest.approx(math.fsum(logprobs) / len(logprobs))


def test_no_tokens_have_no_mean() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        lowest_mean_logprob([], 4)


LOOP = turn([5, 6, 7] * 4, logprobs=[-0.001] * 12)
NOISE = turn(range(12), logprobs=[-0.5] * 6 + [-12.0] * 6)
PLAIN = turn(range(12), logprobs=[-1.0] * 12)


@pytest.mark.parametrize(
    ("given_filters", "loop", "noise"),
    [
        ({}, None, None),
        ({"repeated_share": 0.6, "repeated_ngram": 3}, AnswerFault.REPETITION, None),
        ({"repeated_share": 0.7, "repeated_ngram": 3}, None, None),  # 3 of 10 are distinct: exactly 0.7, not above it
        ({"certain_tokens": 12}, AnswerFault.REPETITION, None),
        ({"certain_tokens": 13}, None, None),
        ({"certain_tokens": 12, "certain_probability": 0.9995}, None, None),
        ({"gibberish_logprob": -6.5}, None, None),  # over the whole answer the mean is −6.25
        ({"gibberish_logprob": -6.5, "gibberish_window": 4}, None, AnswerFault.GIBBERISH),
    ],
)
def test_each_bound_filters_its_own_kind(
    given_filters: dict[str, Any], loop: AnswerFault | None, noise: AnswerFault | None
) -> None:
    filters = FilterSettings(**given_filters)
    assert (caught_by(LOOP, filters), caught_by(NOISE, filters), caught_by(PLAIN, filters)) == (loop, noise, None)


def test_constrained_tokens_do_not_count_as_certain() -> None:
    constrained = msgspec.structs.replace(LOOP, convention=LogprobConvention.CONSTRAINED)
    assert caught_by(constrained, FilterSettings(certain_tokens=2)) is None
    assert caught_by(constrained, FilterSettings(gibberish_logprob=-1e-9)) is None
    assert caught_by(constrained, FilterSettings(repeated_share=0.1, repeated_ngram=2)) is AnswerFault.REPETITION


@pytest.mark.parametrize(
    "filters", [FilterSettings(repeated_share=0.1, repeated_ngram=1), FilterSettings(certain_tokens=4)]
)
def test_placeholders_of_redaction_are_not_measured(filters: FilterSettings) -> None:
    answer = turn([1, 2, 9, 9, 9, 9], logprobs=[-1.0, -1.0, 0.0, 0.0, 0.0, 0.0], prompt=(1, 2))
    assert caught_by(answer, filters) is AnswerFault.REPETITION
    assert caught_by(msgspec.structs.replace(answer, masked=((4, 8),)), filters) is None


@pytest.mark.parametrize("name", ["repeated_ngram", "certain_probability", "gibberish_window", "action"])
def test_a_setting_without_its_bound_is_refused(name: str) -> None:
    values: dict[str, Any] = {
        "repeated_ngram": 4,
        "certain_probability": 0.5,
        "gibberish_window": 8,
        "action": "drop",
    }
    with pytest.raises(ValidationError, match=f"{name} changes nothing without a bound"):
        FilterSettings(**{name: values[name]})
