"""Test the parts of chaos that could make its figures wrong: falsified replies, waiting times, counts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos.__main__ import together
from benchmarks.chaos.accounts import impossible
from benchmarks.chaos.judging import judgements
from benchmarks.chaos.liar import LIES, changed
from benchmarks.chaos.probe import EVERY_S
from benchmarks.chaos.waiting import waits
from proxy.contract.arrays import pack_ids, pack_logprobs

VOCABULARY = 100
TOLD = st.lists(st.tuples(st.floats(-20, -1e-4), st.integers(0, VOCABULARY - 1)), min_size=1, max_size=5)


@given(TOLD, st.sampled_from(sorted(LIES)))
def test_a_falsified_reply_has_the_same_length_and_is_invalid(told: list[tuple[float, int]], lie: str) -> None:
    truth = json.dumps({"output_token_logprobs": [[value, token, None] for value, token in told]}).encode()
    said = changed(truth, lie)
    if said is None:  # the numbers are too short for this falsification
        return
    assert len(said) == len(truth)
    try:
        pairs = json.loads(said)["output_token_logprobs"]
    except json.JSONDecodeError:  # a list with a missing element cannot be parsed, which is a falsification too
        assert lie == "a missing log-probability"
        return
    values = [value for value, _, _ in pairs]
    tokens = [token for _, token, _ in pairs]
    assert (
        len(pairs) < len(told)
        or not all(math.isfinite(value) and value < 0 for value in values)
        or not all(0 <= token < VOCABULARY for token in tokens)
    )


def test_a_reply_without_log_probabilities_is_not_changed() -> None:
    assert changed(b'data: {"text": "no"}\n\n', "not a number") is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "is_impossible"),
    [
        ([1, 2], [-0.5, -1.0], False),
        ([], [], False),
        ([1], [1e-6], False),
        ([1, VOCABULARY], [-0.5, -1.0], True),
        ([1], [-0.5, -1.0], True),
        ([1], [0.5], True),
        ([1], [math.inf], True),
        ([1], [math.nan], True),
    ],
)
def test_impossible_turns_are_counted(ids: list[int], logprobs: list[float], is_impossible: bool) -> None:
    rows = [(pack_ids(ids), pack_logprobs(logprobs))]
    assert impossible(lambda _: rows, VOCABULARY) == is_impossible


def test_a_stall_counts_as_all_the_requests_that_it_delayed(tmp_path: Path) -> None:
    file = tmp_path / "waits"
    file.write_text("10.0 0.001\n10.5 1.0\n10.6 -\n11.0 0.002\n20.0 9.0\n")
    found = waits(file, 10.0, 12.0)
    assert len(found) == pytest.approx(2 + 1.0 / EVERY_S, abs=1)
    assert (min(found), max(found)) == (0.001, 1.0)


def test_counts_of_two_databases_are_added_and_the_longer_wait_is_reported() -> None:
    run = {
        "kills": {"proxy": 2, "trainer": 1, "engine": 0}, "lies": {"a": 1}, "attacks": {"b": {"400": 1}},
        "stuck": 1, "p99_ms": 3.0,
    }  # fmt: skip
    found = together([{"database": "x", **run}, {"database": "y", **run, "p99_ms": 2.0, "lies": {"c": 4}}])
    assert (found["database"], found["stuck"], found["p99_ms"]) == ("x and y", 2, 3.0)
    assert (found["kills"]["proxy"], found["lies"]) == (4, {"a": 1, "c": 4})
    assert "attacks" not in found


async def test_sessions_without_a_score_or_with_two_are_counted() -> None:
    """Of five sessions: one score, two scores, a job that is done with a score that is lost, an answer that the judge
    had nothing to score about, and a job that is not done."""
    done = [("a", '{"scored": 1}'), ("b", '{"scored": 1}'), ("c", '{"scored": 1}'), ("d", '{"skipped": "empty"}')]
    rows: dict[str, Any] = {
        "FROM sessions": [(name,) for name in "abcde"],
        "FROM jobs": [(f"adds:{name}", result) for name, result in done],
        "FROM rewards": [("a", 0.75), ("b", 0.75), ("b", 0.0)],
        "FROM judgements": [(7,)],
    }
    found = await judgements(
        lambda query: next(rows[table] for table in rows if table in query), "second", patience=0.0
    )
    assert found == {"judged": 2, "judge_failures": 7, "unjudged": 2, "judged_twice": 1, "wrong_scores": 1}
