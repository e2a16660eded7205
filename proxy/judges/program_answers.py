"""Rewards in the answers of judges that are programs: verifiers and functions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from proxy.jobs.kinds import JobFailure
from proxy.judges.answers import Verdict, text_of
from proxy.judges.subjects import Score, Subject

MOST_REWARDS = 200
_KEYS = {"name", "value", "turn_id", "comment"}


def scores_in(answer: Any, subject: Subject) -> tuple[Score, ...]:
    """Return the rewards that a program gives a session; none for null and for an empty list.

    An answer is a number, null, `{"rewards": [{"value", "name"?, "turn_id"?, "comment"?}]}`, or that list alone.
    Raise JobFailure for anything else, naming what is wrong.
    """
    if answer is None:
        return ()
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = [{"value": answer}]
    if isinstance(answer, Mapping):
        if set(answer) != {"rewards"}:
            raise JobFailure('the answer is no object with "rewards" alone')
        answer = answer["rewards"]
    if not isinstance(answer, list | tuple):
        raise JobFailure('the answer is neither a number, null, a list of rewards nor {"rewards": […]}')
    if len(answer) > MOST_REWARDS:
        raise JobFailure(f"the answer has {len(answer)} rewards; {MOST_REWARDS} is the most")
    turns = {turn["id"] for turn in subject.candidates[0].document["turns"]}
    found = tuple(_score(entry, number, subject, turns) for number, entry in enumerate(answer))
    about = [(score.reward, score.turn_id) for score in found]
    if len(set(about)) != len(about):
        raise JobFailure("the answer has two rewards of one name about the same turn or session")
    return found


def _score(entry: Any, number: int, subject: Subject, turns: set[str]) -> Score:
    where = f"rewards[{number}]"
    if not isinstance(entry, Mapping) or not set(entry) <= _KEYS or "value" not in entry:
        raise JobFailure(f"{where} is no object of value and, optionally, name, turn_id and comment")
    value, judge = entry["value"], subject.judge
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise JobFailure(f"{where}.value is not a finite number")
    if not judge.low <= value <= judge.high:
        raise JobFailure(
            f"{where}.value is not from {judge.low:g} to {judge.high:g}, which are the judge's low and high"
        )
    name, turn_id = entry.get("name"), entry.get("turn_id")
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= 128):
        raise JobFailure(f"{where}.name has 1 to 128 characters")
    if turn_id is not None and turn_id not in turns:
        raise JobFailure(f"{where}.turn_id is no turn of the session")
    verdict = Verdict(score=float(value), spread=0.0, rationale=text_of(entry.get("comment")))
    return Score(candidate=0, verdict=verdict, votes=(float(value),), reward=name, turn_id=turn_id)
