"""Sessions and answers as candidates of a judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.judges.reader import SubjectReader, answered
from proxy.judges.subjects import Candidate, Skipped, Subject, digest_of, together
from proxy.judges.transcripts import has_answer, transcript_of
from proxy.settings import JudgeSettings
from proxy.transfer.conversation import messages_to
from proxy.transfer.records import SessionRecord
from proxy.turns.answers import answer_message

# A prompt with fewer characters for each conversation would show nothing of it.
_FEWEST_CHARACTERS = 400


def session_candidate(record: SessionRecord, *, max_characters: int) -> Candidate:
    """Return a whole session: the conversation that led to its last answer."""
    shown = transcript_of(record.messages, task=record.task, max_characters=max_characters)
    return Candidate(session_id=record.session_id, shown=shown, digest=shown.digest, document=document_of(record))


def document_of(record: SessionRecord) -> dict[str, Any]:
    """Return a session as a program that judges it receives it."""
    turns = [
        {"id": turn.id, "parent": turn.parent, "messages": turn.messages, "answer": answer_message(turn.response)}
        for turn in record.turns
    ]
    return {
        "session_id": record.session_id,
        "run": record.run,
        "task": record.task,
        "group": record.group,
        "purpose": record.purpose.value,
        "metadata": record.metadata,
        "messages": record.messages,
        "tools": record.tools,
        "turns": turns,
    }


def one_session(reader: SubjectReader) -> Subject | Skipped:
    """Return the job's session as the only candidate."""
    record = reader.session()
    if isinstance(record, Skipped):
        return record
    if not has_answer(record.messages):
        return Skipped("the session has no answer to judge")
    return reader.subject([session_candidate(record, max_characters=reader.judge.max_characters)])


def compared_sessions(reader: SubjectReader, records: Sequence[SessionRecord]) -> Subject | Skipped:
    """Return sessions that are shown together, each with its share of the characters."""
    share = _share(reader.judge, len(records))
    candidates = [
        session_candidate(record, max_characters=share) for record in records if has_answer(record.messages)
    ]
    if len(candidates) < 2:
        return Skipped("fewer than two sessions of the group have an answer")
    return reader.subject(together(candidates))


def compared_answers(reader: SubjectReader) -> Subject | Skipped:
    """Return several answers to the same conversation, turns of one session, with that conversation as context."""
    record = reader.session()
    if isinstance(record, Skipped):
        return record
    places = {turn.id: index for index, turn in enumerate(record.turns)}
    turns = [record.turns[places[turn_id]] for turn_id in reader.turn_ids if turn_id in places]
    turns = [turn for turn in turns if answered([turn]) and answer_message(turn.response) is not None]
    if len(turns) < 2:
        return Skipped("fewer than two of the answers exist")
    (first, *_) = turns
    answers = [(turn.id, answer_message(turn.response) or {}) for turn in turns]
    return _answers_to(reader, record, places[first.id], answers)


def with_unseen_answer(reader: SubjectReader, turn_id: str, response: Mapping[str, Any]) -> Subject | Skipped:
    """Return the answer of a turn of the job's session, and another answer to its prompt, which is no turn and is
    recorded as `response`."""
    record = reader.session()
    if isinstance(record, Skipped):
        return record
    place = next((place for place, turn in enumerate(record.turns) if turn.id == turn_id), None)
    seen = None if place is None else answer_message(record.turns[place].response)
    unseen = answer_message(response)
    if place is None or seen is None or unseen is None:
        return Skipped("one of the two answers does not exist any more")
    return _answers_to(reader, record, place, [(turn_id, seen), (None, unseen)])


def _answers_to(
    reader: SubjectReader, record: SessionRecord, place: int, answers: Sequence[tuple[str | None, dict[str, Any]]]
) -> Subject:
    """Return answers to the conversation of the turn at `place`, each with its turn."""
    share = _share(reader.judge, len(answers) + 1)
    path = messages_to(record.turns, place)
    context = transcript_of(path[:-1], task=record.task, max_characters=share)
    candidates = []
    for turn_id, answer in answers:
        shown = transcript_of([answer], task=None, max_characters=share)
        digest = digest_of(turn_id or "", context.digest, shown.digest)
        candidates.append(Candidate(session_id=record.session_id, turn_id=turn_id, shown=shown, digest=digest))
    return reader.subject(together(candidates), context=context)


def _share(judge: JudgeSettings, parts: int) -> int:
    return max(_FEWEST_CHARACTERS, judge.max_characters // parts)
