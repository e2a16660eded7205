"""`verifier`: rewards from the user's own HTTP service, which gets the signed transcript."""

from __future__ import annotations

import json
from typing import Any

from proxy.jobs.kinds import JobFailure
from proxy.jobs.signed_requests import post_signed
from proxy.judges.candidates import one_session
from proxy.judges.program_answers import scores_in
from proxy.judges.reader import SubjectReader
from proxy.judges.subjects import Judged, Skipped, Subject, digest_of
from proxy.judges.tools import Tools
from proxy.outbound.client import Answer

_ANSWER_BYTES = 1 << 20


class Verifier:
    def find(self, reader: SubjectReader) -> Subject | Skipped:
        return one_session(reader)

    async def judge(self, tools: Tools, subject: Subject) -> Judged:
        """Post the session to the judge's URL. Its id is the same in every attempt at the same content."""
        judge, (candidate,) = subject.judge, subject.candidates
        event_id = "jdg_" + digest_of(subject.run_id, subject.name, subject.fingerprint, candidate.digest)[:32]
        document = {"type": "session.judge", "judge": subject.name, **candidate.document}
        body = json.dumps({**document, "run": subject.run_name}, default=str).encode()
        try:
            answer = await post_signed(
                tools.client,
                tools.secrets,
                secret_owner(subject.run_id, subject.name),
                judge.url or "",
                body,
                event_id=event_id,
                timeout_seconds=judge.timeout_seconds,
                answer_bytes=_ANSWER_BYTES,
            )
            return Judged(scores=scores_in(_decoded(answer), subject))
        except JobFailure as failure:
            return Judged(failure=failure)


def secret_owner(run_id: str, judge: str) -> str:
    """Return the name under which a verifier's signing secret is derived; no webhook has one of this form."""
    return f"judge {run_id} {judge}"


def _decoded(answer: Answer) -> Any:
    if answer.problem is not None:
        raise JobFailure(f"the verifier: {answer.problem}")
    if answer.is_cut:
        raise JobFailure(f"the verifier's answer has more than {_ANSWER_BYTES >> 20} MiB")
    if answer.status == 204:
        return None
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise JobFailure("the verifier's answer is no JSON") from error
