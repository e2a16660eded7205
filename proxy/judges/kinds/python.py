"""`python`: rewards from a function of the operator's modules."""

from __future__ import annotations

import asyncio

from proxy.jobs.kinds import JobFailure
from proxy.judges.candidates import one_session
from proxy.judges.program_answers import scores_in
from proxy.judges.reader import SubjectReader
from proxy.judges.subjects import Judged, Skipped, Subject
from proxy.judges.tools import Tools


class Python:
    def find(self, reader: SubjectReader) -> Subject | Skipped:
        return one_session(reader)

    async def judge(self, tools: Tools, subject: Subject) -> Judged:
        """Call the function with the session. Raise JobRefused if this process must not."""
        function, seconds = subject.judge.function or "", subject.judge.timeout_seconds
        tools.functions.check(function)
        try:
            async with asyncio.timeout(seconds):
                answer = await tools.functions.call(function, subject.candidates[0].document)
            return Judged(scores=scores_in(answer, subject))
        except TimeoutError:
            return Judged(failure=JobFailure(f"the function {function} did not return within {seconds:g} seconds"))
        except JobFailure as failure:
            return Judged(failure=failure)
