from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.judges.answers import MOST_RATIONALE, InvalidAnswer, Vote, read_vote, verdict

scores = st.floats(0, 10, allow_nan=False)


@pytest.mark.parametrize(
    "text",
    [
        '{"rationale": "so", "score": 7.5}',
        'Here it is:\n```json\n{"score": "7.5", "rationale": "so"}\n```',
        "It was good. **Score:** 7.5",
        "Score = 7.5\nFinal score: 7.5",
        "I set the score is 7.5.",
    ],
)
def test_a_score_is_read_from_json_and_from_text(text: str) -> None:
    assert read_vote(text, low=0, high=10).score == 7.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fine",
        '{"rationale": "so", "score": 0.',
        '{"score": NaN}',
        '{"score": null}',
        '{"score": true}',
        '{"score": "very good"}',
        '{"score": 85}',
        '{"score": -1}',
        '{"score": 1}{"score": 9}',
        "Score: 8/10",
        "Score: 1. No, score: 9",
        "underscore: 3",
        "{" * 100_000,
        '{"score": 1' + "0" * 5000 + "}",
    ],
)
def test_other_answers_are_invalid(text: str) -> None:
    with pytest.raises(InvalidAnswer):
        read_vote(text, low=0, high=10)


@given(scores, st.text())
def test_every_answer_of_the_schema_is_read(score: float, rationale: str) -> None:
    vote = read_vote(json.dumps({"rationale": rationale, "score": score}), low=0, high=10)
    assert vote.score == score
    assert len(vote.rationale) <= MOST_RATIONALE


@given(st.lists(scores, min_size=1))
def test_the_verdict_lies_among_the_votes(values: list[float]) -> None:
    found = verdict([Vote(score=value, rationale=str(value)) for value in values])
    assert min(values) <= found.score <= max(values)
    assert found.spread == max(values) - min(values)
    assert found.rationale in map(str, values)
