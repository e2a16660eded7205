"""`rubric`: a score of one session by criteria."""

from __future__ import annotations

from proxy.judges.answers import read_vote
from proxy.judges.asking import ask_all
from proxy.judges.candidates import one_session
from proxy.judges.prompts import messages_of
from proxy.judges.reader import SubjectReader
from proxy.judges.subjects import Judged, Skipped, Subject
from proxy.judges.tools import Tools
from proxy.judges.voting import FORM, majority


class Rubric:
    def find(self, reader: SubjectReader) -> Subject | Skipped:
        return one_session(reader)

    async def judge(self, tools: Tools, subject: Subject) -> Judged:
        """Ask for all votes at the same time; more than half of them must be valid."""
        judge, (candidate,) = subject.judge, subject.candidates
        request = messages_of(subject.prompt, judge, [("", candidate.shown)])
        answers = await ask_all(
            tools.models,
            subject,
            [request] * judge.votes,
            FORM,
            lambda _, text: read_vote(text, low=judge.low, high=judge.high),
        )
        return majority(answers, candidate=0, wanted=judge.votes)
