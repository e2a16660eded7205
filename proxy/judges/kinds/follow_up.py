"""`follow_up`: a score of each answer by what came next: the user's next message, or the result of a tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.contract.turn import Continuation
from proxy.judges.answers import InvalidAnswer, Vote, read_object, read_vote
from proxy.judges.asking import Answers, ask_all
from proxy.judges.prompts import Messages, messages_of
from proxy.judges.reader import SubjectReader
from proxy.judges.subjects import Candidate, Judged, Score, Skipped, Subject, digest_of
from proxy.judges.tools import Tools
from proxy.judges.transcripts import transcript_of
from proxy.judges.voting import form_of, is_majority, score_of
from proxy.transfer.conversation import messages_to
from proxy.transfer.records import SessionRecord
from proxy.turns.answers import answer_message

_FORM = form_of({"rationale": {"type": "string"}, "score": {"type": ["number", "null"]}})
# Answers of one session that are judged, the last ones; each costs a request for every vote.
MOST_ANSWERS = 50
_CONTINUES = (Continuation.EXACT, Continuation.RETEMPLATED)
_REPLIES = ("user", "tool")


class FollowUp:
    def find(self, reader: SubjectReader) -> Subject | Skipped:
        record = reader.session()
        if isinstance(record, Skipped):
            return record
        found = _replied(record)
        if not found:
            return Skipped("no answer of the session was followed by a message")
        kept = found[-MOST_ANSWERS:]
        candidates = [_candidate(record, turn, replies, reader.judge.max_characters) for turn, replies in kept]
        return reader.subject(candidates, left_out=len(found) - len(kept))

    async def judge(self, tools: Tools, subject: Subject) -> Judged:
        """Ask about each answer, `votes` times. An answer whose votes mostly say that the follow-up tells nothing
        about it has no score."""
        votes = subject.judge.votes
        asked = [place for place in range(len(subject.candidates)) for _ in range(votes)]
        answers = await ask_all(
            tools.models,
            subject,
            [_request(subject, place) for place in asked],
            _FORM,
            lambda _, text: _read(subject, text),
        )
        scores: list[Score] = []
        for place in range(len(subject.candidates)):
            own = [vote for vote in answers.votes[place * votes : (place + 1) * votes] if vote is not None]
            if not is_majority(len(own), votes):
                return _failed(answers, len(own), votes)
            said = [vote for vote in own if isinstance(vote, Vote)]
            if is_majority(len(said), len(own)):
                scores.append(score_of(said, candidate=place, wanted=votes))
            else:
                scores.append(Score(candidate=place, verdict=None, problem="the follow-up says nothing about it"))
        return Judged(scores=tuple(scores), usage=answers.usage)


class Silent:
    """A vote that the follow-up says nothing about the answer."""


def _failed(answers: Answers[Any], valid: int, votes: int) -> Judged:
    failure = answers.failure(f"{valid} of {votes} answers of the judge about a turn are valid")
    return Judged(failure=failure, usage=answers.usage, invalid_votes=votes - valid)


def _read(subject: Subject, text: str) -> Vote | Silent:
    try:
        if read_object(text, "score")["score"] is None:
            return Silent()
    except InvalidAnswer:
        pass  # it may name its score in words
    return read_vote(text, low=subject.judge.low, high=subject.judge.high)


def _replied(record: SessionRecord) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the turns that a user's message or a tool's result followed, as indices, each with what followed."""
    followed: dict[int, list[dict[str, Any]]] = {}
    for turn in record.turns:
        if turn.parent is None or turn.continuation not in _CONTINUES:
            continue
        replies = [message for message in turn.messages if message.get("role") in _REPLIES]
        # Of several continuations the first: others are retries of the same agent.
        if replies and answer_message(record.turns[turn.parent].response) is not None:
            followed.setdefault(turn.parent, replies)
    return sorted(followed.items())


def _candidate(
    record: SessionRecord, index: int, replies: Sequence[dict[str, Any]], max_characters: int
) -> Candidate:
    turn = record.turns[index]
    before = messages_to(record.turns, index)
    half = max(max_characters // 2, 1)
    shown = transcript_of(before, task=record.task, max_characters=half)
    follow = transcript_of(replies, task=None, max_characters=half)
    return Candidate(
        session_id=record.session_id,
        turn_id=turn.id,
        shown=shown,
        reply=follow,
        digest=digest_of(turn.id, shown.digest, follow.digest),
    )


def _request(subject: Subject, place: int) -> Messages:
    candidate = subject.candidates[place]
    assert candidate.reply is not None
    return messages_of(subject.prompt, subject.judge, [("before", candidate.shown), ("after", candidate.reply)])
