"""Votes of a model as one score. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.judges.answers import Vote, verdict
from proxy.judges.asking import Answers
from proxy.judges.subjects import Judged, Score


def form_of(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


FORM = form_of({"rationale": {"type": "string"}, "score": {"type": "number"}})
"""The schema of an answer with one score."""


def is_majority(votes: int, wanted: int) -> bool:
    """Return whether the votes suffice: the median of fewer could be decided by the votes that are missing."""
    return 2 * votes > wanted


def score_of(votes: Sequence[Vote], *, candidate: int, wanted: int) -> Score:
    """Return the score of at least one vote."""
    return Score(
        candidate=candidate,
        verdict=verdict(votes),
        votes=tuple(vote.score for vote in votes),
        invalid_votes=wanted - len(votes),
    )


def majority(answers: Answers[Vote], *, candidate: int, wanted: int) -> Judged:
    """Return the score of a candidate that has all of the answers, or why there are not enough valid ones."""
    votes = [vote for vote in answers.votes if vote is not None]
    if is_majority(len(votes), wanted):
        return Judged(scores=(score_of(votes, candidate=candidate, wanted=wanted),), usage=answers.usage)
    return Judged(
        failure=answers.failure(f"{len(votes)} of {wanted} answers of the judge are valid"),
        usage=answers.usage,
        votes=tuple(vote.score for vote in votes),
        invalid_votes=wanted - len(votes),
    )
