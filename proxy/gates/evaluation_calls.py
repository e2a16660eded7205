"""Calls of a user's evaluator: jobs, one for each version and suite, which the gate `evaluation` enqueues."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sqlalchemy import Connection, select

from proxy.contract.states import JobState
from proxy.database.tables import JobRow
from proxy.lifecycle.outbox import enqueue
from proxy.runs.service import RunView

EVALUATING = "evaluate"
"""The kind of job by which an evaluator is called (`proxy/gates/evaluator.py`)."""


class EvaluationCalls:
    """The calls about versions of a run whose settings name an evaluator, within one transaction."""

    def __init__(self, connection: Connection, run: RunView) -> None:
        self._connection = connection
        self._run = run

    def missing(self, versions: Sequence[int]) -> list[int]:
        """Return those of the versions that the evaluator was not called about."""
        return [version for version in versions if self._find(version) is None]

    def enqueue(self, version: int, *, now: float) -> None:
        """Enqueue the call about a version, unless there is one."""
        payload = {"version": version, "suite": self._run.settings.release.evaluation.suite}
        enqueue(
            self._connection, kind=EVALUATING, key=self._key(version), payload=payload, now=now, run_id=self._run.id
        )

    def describe(self, version: int) -> str:
        """Return how far the call about a version is, as a clause of the gate's finding."""
        match self._find(version):
            case None:
                return f"the evaluator will be called about version {version}"
            case (JobState.DONE, _):
                return f"the evaluator has answered about version {version}"
            case (JobState.DEAD, error):
                return (
                    f"the call of the evaluator about version {version} failed for good ({error}): see"
                    " `base-rl jobs list`, or post the results"
                )
            case (JobState.CANCELLED, _):
                return f"the call of the evaluator about version {version} was cancelled: post the results"
            case (_, None):
                return f"the evaluator is being called about version {version}"
            case (_, error):
                return f"the evaluator is called again about version {version} ({error})"
        raise AssertionError("a job has a state")

    def _find(self, version: int) -> tuple[JobState, str | None] | None:
        statement = select(JobRow.state, JobRow.error).where(
            JobRow.kind == EVALUATING, JobRow.key == self._key(version)
        )
        row = self._connection.execute(statement).first()
        return None if row is None else (JobState(row.state), row.error)

    def _key(self, version: int) -> str:
        """Return the job's key. Another URL is another evaluator, so it is called about the same version again."""
        wanted = self._run.settings.release.evaluation
        digest = hashlib.sha256((wanted.url or "").encode()).hexdigest()[:16]
        return f"{self._run.id}:{version}:{wanted.suite}:{digest}"
