"""Scores in judges' answers, and their combination. Pure."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

MOST_RATIONALE = 4000
_CUT = " [… shortened]"

# "Score: 0.5" and "**score** = 0.5", but not "Score: 8/10", which is on a scale of its own.
_SCORE = re.compile(r"""\bscore\b["'*\s]*(?::|=|is)["'*\s]*(-?\d+(?:\.\d+)?)(?!\s*/|[\d.]*\d)""", re.IGNORECASE)


class InvalidAnswer(Exception):
    """A judge's answer has no score in the range. The message does not quote the answer, because errors of jobs stay
    when a session is erased."""


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """One valid answer."""

    score: float
    rationale: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The votes of a judge as one score: the median, or of two middle votes the mean. `spread` is the highest minus
    the lowest vote; `rationale` that of the vote nearest to the score."""

    score: float
    spread: float
    rationale: str


def read_vote(text: str, *, low: float, high: float) -> Vote:
    """Return the score and the rationale of an answer. Raise InvalidAnswer.

    An answer is a JSON object, alone or within other text, or names its score once as in `Score: 0.5`. A score out of
    the range is no score: the judge has not understood the scale, and a bound would be a guess.
    """
    score, rationale = _read(text)
    return Vote(score=bounded(score, low=low, high=high), rationale=shortened(rationale))


def bounded(value: Any, *, low: float, high: float) -> float:
    """Return a score of an answer as a number. Raise InvalidAnswer if it is none, or out of the range."""
    score = _number(value)
    if not math.isfinite(score):
        raise InvalidAnswer("the score is not a finite number")
    if not low <= score <= high:
        raise InvalidAnswer(f"the score {score:g} is not from {low:g} to {high:g}")
    return score


def read_object(text: str, key: str) -> dict[str, Any]:
    """Return the one JSON object in an answer that has the key. Raise InvalidAnswer."""
    found = [each for each in _objects(text) if key in each]
    if len(found) != 1:
        raise InvalidAnswer(
            f"the answer has more than one {key!r}" if found else f"the answer is no JSON object with {key!r}"
        )
    return found[0]


def text_of(value: Any) -> str:
    """Return a rationale, shortened; empty if the value is no text."""
    return shortened(value) if isinstance(value, str) else ""


def verdict(votes: Sequence[Vote]) -> Verdict:
    """Combine at least one vote."""
    scores = [vote.score for vote in votes]
    median = statistics.median(scores)
    nearest = min(votes, key=lambda vote: abs(vote.score - median))
    return Verdict(score=median, spread=max(scores) - min(scores), rationale=nearest.rationale)


def shortened(text: str) -> str:
    """Return the text, cut with a notice if it is very long."""
    text = text.strip()
    return text if len(text) <= MOST_RATIONALE else text[: MOST_RATIONALE - len(_CUT)] + _CUT


def _read(text: str) -> tuple[float, str]:
    found = [each for each in _objects(text) if "score" in each]
    if len(found) > 1:
        raise InvalidAnswer("the answer has more than one score")
    if found:
        return _number(found[0]["score"]), str(found[0].get("rationale") or "")
    if "{" in text:
        raise InvalidAnswer("the answer is no JSON object with a score")
    named = {match[1] for match in _SCORE.finditer(text)}
    if len(named) != 1:
        raise InvalidAnswer("the answer has more than one score" if named else "the answer has no score")
    return float(named.pop()), text


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidAnswer("the score is not a number")
    try:
        return float(value)
    except (ValueError, OverflowError) as error:
        raise InvalidAnswer("the score is not a number") from error


def _objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects in the text that are not inside of another one."""
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    at = text.find("{")
    # A bound on attempts: a text of nothing but braces would take quadratic time.
    for _ in range(50):
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            found.append(value)
        at = text.find("{", end)
    return found
