"""`relative`: scores of all sessions of a group, or of several answers at one turn, which the model sees together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from proxy.judges.answers import InvalidAnswer, Vote, bounded, read_object, text_of
from proxy.judges.asking import ask_all
from proxy.judges.candidates import compared_answers, compared_sessions
from proxy.judges.prompts import Messages, messages_of
from proxy.judges.reader import SubjectReader
from proxy.judges.subjects import Judged, NotYet, Skipped, Subject
from proxy.judges.tools import Tools
from proxy.judges.voting import form_of, is_majority, score_of

_GRADE = form_of({"id": {"type": "integer"}, "rationale": {"type": "string"}, "score": {"type": "number"}})
_FORM = form_of({"scores": {"type": "array", "items": _GRADE}})


class Relative:
    def find(self, reader: SubjectReader) -> Subject | Skipped | NotYet:
        if reader.turn_ids:
            return compared_answers(reader)
        records = reader.group()
        return records if isinstance(records, Skipped | NotYet) else compared_sessions(reader, records)

    async def judge(self, tools: Tools, subject: Subject) -> Judged:
        """Ask for all votes at the same time. Each sees the candidates in another order, because models prefer some
        positions."""
        wanted, count = subject.judge.votes, len(subject.candidates)
        orders = [_order(subject, number) for number in range(wanted)]
        answers = await ask_all(
            tools.models,
            subject,
            [_request(subject, order) for order in orders],
            _FORM,
            lambda number, text: _read(text, orders[number], subject),
        )
        votes = [vote for vote in answers.votes if vote is not None]
        if not is_majority(len(votes), wanted):
            failure = answers.failure(f"{len(votes)} of {wanted} answers of the judge are valid")
            return Judged(failure=failure, usage=answers.usage, invalid_votes=wanted - len(votes))
        scores = [score_of([vote[place] for vote in votes], candidate=place, wanted=wanted) for place in range(count)]
        return Judged(scores=tuple(scores), usage=answers.usage)


def _order(subject: Subject, number: int) -> list[int]:
    """Return the places of the candidates in the order in which a vote sees them, the same in every attempt.

    The first votes, one for each candidate, have rotations of one random order, so that each of them shows a
    candidate at a different position. Further votes have those of another order.
    """
    times, shift = divmod(number, len(subject.candidates))
    order = list(range(len(subject.candidates)))
    # Seeded by the content: a repeated request is the same, so providers can reuse their caches.
    random.Random(f"{times} {subject.candidates[0].digest}").shuffle(order)  # noqa: S311
    return order[shift:] + order[:shift]


def _request(subject: Subject, order: Sequence[int]) -> Messages:
    blocks = [] if subject.context is None else [("context", subject.context)]
    blocks += [(str(number), subject.candidates[place].shown) for number, place in enumerate(order, 1)]
    return messages_of(subject.prompt, subject.judge, blocks)


def _read(text: str, order: Sequence[int], subject: Subject) -> list[Vote]:
    """Return a vote for each candidate. Raise InvalidAnswer unless the answer scores each of them once."""
    grades = read_object(text, "scores")["scores"]
    if not isinstance(grades, list) or not all(isinstance(grade, dict) for grade in grades):
        raise InvalidAnswer("the scores are not a list of objects")
    by_number: dict[Any, dict[str, Any]] = {grade.get("id"): grade for grade in grades if _is_number(grade.get("id"))}
    if len(grades) != len(order) or set(by_number) != set(range(1, len(order) + 1)):
        raise InvalidAnswer(f"the answer does not score each of the {len(order)} conversations once")
    votes: dict[int, Vote] = {}
    for number, place in enumerate(order, 1):
        grade = by_number[number]
        score = bounded(grade.get("score"), low=subject.judge.low, high=subject.judge.high)
        votes[place] = Vote(score=score, rationale=text_of(grade.get("rationale")))
    return [votes[place] for place in range(len(order))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
