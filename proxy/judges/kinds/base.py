"""The interface of all kinds of judges."""

from __future__ import annotations

from typing import Protocol

from proxy.judges.reader import SubjectReader
from proxy.judges.subjects import Judged, NotYet, Skipped, Subject
from proxy.judges.tools import Tools


class Kind(Protocol):
    """A kind of judge, in two steps: `find` reads what is to be scored, within one read transaction; `judge` scores
    it, without the store. Both raise JobRefused if no repetition can succeed."""

    def find(self, reader: SubjectReader) -> Subject | Skipped | NotYet: ...

    async def judge(self, tools: Tools, subject: Subject) -> Judged:
        """Return the scores of the candidates, or the failure of the attempt."""
        ...
