"""`pairwise`: comparisons of two sessions at a time, each in both orders. A session's score is its share of wins."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from proxy.judges.answers import InvalidAnswer, Verdict, read_object, text_of
from proxy.judges.asking import Answers, ask_all
from proxy.judges.candidates import compared_answers, compared_sessions
from proxy.judges.prompts import Messages, messages_of
from proxy.judges.reader import SubjectReader
from proxy.judges.subjects import Judged, NotYet, Score, Skipped, Subject
from proxy.judges.tools import Tools
from proxy.judges.voting import form_of, is_majority

_FORM = form_of({"rationale": {"type": "string"}, "better": {"enum": ["1", "2", "neither"]}})
# All pairs of this many candidates; of more, each is compared with this many of its neighbours in a circle.
_ALL_PAIRS, _NEIGHBOURS = 6, 3

Pair = tuple[int, int]


class Choice(msgspec.Struct, frozen=True):
    """An answer about a pair: the place of the better candidate, None if neither is better."""

    better: int | None
    rationale: str


class Pairwise:
    def find(self, reader: SubjectReader) -> Subject | Skipped | NotYet:
        if reader.turn_ids:
            return compared_answers(reader)
        records = reader.group()
        return records if isinstance(records, Skipped | NotYet) else compared_sessions(reader, records)

    async def judge(self, tools: Tools, subject: Subject) -> Judged:
        """Ask about each pair in both orders, `votes` times. A pair counts if both orders have the same answer, and
        more than half of all requests must be answered validly."""
        pairs = pairs_of(len(subject.candidates))
        votes = subject.judge.votes
        asked = [order for pair in pairs for order in (pair, pair[::-1]) for _ in range(votes)]
        answers = await ask_all(
            tools.models,
            subject,
            [_request(subject, order) for order in asked],
            _FORM,
            lambda number, text: _read(text, asked[number]),
        )
        valid = sum(choice is not None for choice in answers.votes)
        if not is_majority(valid, len(asked)):
            failure = answers.failure(f"{valid} of {len(asked)} answers of the judge are valid")
            return Judged(failure=failure, usage=answers.usage, invalid_votes=len(asked) - valid)
        points = _points(answers, pairs, votes)
        scores = [_score(subject, place, points) for place in range(len(subject.candidates))]
        return Judged(scores=tuple(scores), usage=answers.usage)


def pairs_of(count: int) -> list[Pair]:
    """Return the pairs to compare: all of a few candidates, and of many each with some others."""
    if count <= _ALL_PAIRS:
        return [(first, second) for first in range(count) for second in range(first + 1, count)]
    return [(first, (first + step) % count) for first in range(count) for step in range(1, _NEIGHBOURS + 1)]


def _request(subject: Subject, order: Pair) -> Messages:
    blocks = [] if subject.context is None else [("context", subject.context)]
    blocks += [(str(number), subject.candidates[place].shown) for number, place in enumerate(order, 1)]
    return messages_of(subject.prompt, subject.judge, blocks)


def _read(text: str, order: Pair) -> Choice:
    answer = read_object(text, "better")
    better = str(answer["better"])
    if better not in {"1", "2", "neither"}:
        raise InvalidAnswer("the better one is neither 1, 2 nor neither")
    return Choice(None if better == "neither" else order[int(better) - 1], text_of(answer.get("rationale")))


Points = dict[int, list[tuple[float, str]]]


def _points(answers: Answers[Choice], pairs: Sequence[Pair], votes: int) -> Points:
    """Return what each candidate got in the pairs that were decided: 1 for a win, 0 for a defeat, 0.5 for neither,
    each with the rationale."""
    points: Points = {}
    for number, (first, second) in enumerate(pairs):
        start = 2 * votes * number
        straight = _most_frequent(answers.votes[start : start + votes])
        reverse = _most_frequent(answers.votes[start + votes : start + 2 * votes])
        # A judge that names the same position in both orders, or is not sure, has not compared anything.
        if straight is None or reverse is None or straight.better != reverse.better:
            continue
        for place in (first, second):
            value = 0.5 if straight.better is None else float(straight.better == place)
            points.setdefault(place, []).append((value, straight.rationale))
    return points


def _most_frequent(choices: Sequence[Choice | None]) -> Choice | None:
    """Return the choice of more than half of the votes; None if there is none."""
    for choice in choices:
        same = [
            other for other in choices if other is not None and choice is not None and other.better == choice.better
        ]
        if is_majority(len(same), len(choices)):
            return choice
    return None


def _score(subject: Subject, place: int, points: Points) -> Score:
    mine = points.get(place)
    if not mine:
        return Score(candidate=place, verdict=None, problem="the two orders of its comparisons disagree")
    low, high = subject.judge.low, subject.judge.high
    values = [low + (high - low) * value for value, _ in mine]
    share = sum(values) / len(values)
    return Score(
        candidate=place,
        verdict=Verdict(score=share, spread=max(values) - min(values), rationale=mine[0][1]),
        votes=tuple(values),
    )
