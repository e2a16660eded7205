"""Sessions and answers as candidates of a judge."""

from __future__ import annotations

from collections.abc import Sequence
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
    share = _share(reader.judge, len(turns) + 1)
    (first, *_) = turns
    path = messages_to(record.turns, places[first.id])
    context = transcript_of(path[:-1], task=record.task, max_characters=share)
    candidates = []
    for turn in turns:
        shown = transcript_of([answer_message(turn.response) or {}], task=None, max_characters=share)
        digest = digest_of(turn.id, context.digest, shown.digest)
        candidates.append(Candidate(session_id=record.session_id, turn_id=turn.id, shown=shown, digest=digest))
    return reader.subject(together(candidates), context=context)


def _share(judge: JudgeSettings, parts: int) -> int:
    return max(_FEWEST_CHARACTERS, judge.max_characters // parts)
