"""Calls a user's evaluator: a service that lets an agent attempt the tasks of a suite with a version of a run."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection

from proxy.clock import Clock
from proxy.database.unit_of_work import Database
from proxy.gates.evaluation_calls import EVALUATING
from proxy.gates.repository import GateRepository
from proxy.gates.results import ResultsBody
from proxy.jobs.kinds import JobFailure, JobKind, Json, RunningJob
from proxy.jobs.signed_requests import post_signed
from proxy.lifecycle.signals import Signals
from proxy.outbound.client import Answer, Client
from proxy.outbound.secrets import SigningSecrets
from proxy.runs.service import RunDirectory, RunView
from proxy.versions.repository import WITHDRAWN, VersionRepository

# How long an evaluator may take to answer. A longer evaluation answers 202 and posts its results.
_ANSWER_SECONDS = 300.0
# Above the bound on an answer, so that the exchange fails first, with its own message.
_JOB_SECONDS = 360.0
_ANSWER_BYTES = 1 << 20
# Calls at the same time over all processes: each may hold its place for minutes.
_CONCURRENCY = 4


class Evaluator:
    """Runs jobs of the kind `evaluate`, and shows the secret by which an evaluator recognises the proxy."""

    def __init__(
        self,
        *,
        database: Database,
        runs: RunDirectory,
        client: Client,
        secrets: SigningSecrets,
        signals: Signals,
        clock: Clock,
    ) -> None:
        self._database = database
        self._runs = runs
        self._client = client
        self._secrets = secrets
        self._signals = signals
        self._clock = clock

    def kind(self) -> JobKind:
        return JobKind(name=EVALUATING, handler=self.evaluate, concurrency=_CONCURRENCY, timeout_seconds=_JOB_SECONDS)

    def secret(self, run: RunView) -> str:
        """Return the secret that signs the requests to the run's evaluator."""
        return self._secrets.text(_secret_owner(run), 1)

    async def evaluate(self, job: RunningJob) -> Json | None:
        """Post the version to evaluate, and store the results of the answer.

        The results and the completion are one transaction. After a failure in between, the evaluator is called again
        with the same id; results of the same attempt are replaced, so nothing counts twice.
        """
        run = await self._runs.by_id(job.run_id or "")
        wanted, version = run.settings.release.evaluation, int(job.payload["version"])
        if wanted.url is None or wanted.suite != job.payload["suite"]:
            return {"skipped": "the run's settings have changed"}
        if await self._database.read(lambda connection: _is_withdrawn(connection, run, version)):
            return {"skipped": "the version was withdrawn"}
        document = {
            "type": "version.evaluate",
            "run": run.name,
            "version": version,
            "model": f"{run.name}@{version}",
            "suite": wanted.suite,
            "tasks": wanted.tasks,
        }
        answer = await post_signed(
            self._client,
            self._secrets,
            _secret_owner(run),
            wanted.url,
            json.dumps(document).encode(),
            event_id=job.id,
            timeout_seconds=_ANSWER_SECONDS,
            answer_bytes=_ANSWER_BYTES,
        )
        results = results_in(answer)
        if not results:
            return {"status": answer.status, "results": 0}
        suite, now = str(wanted.suite), self._clock()

        def save(connection: Connection) -> None:
            # Under the lock of the run, as posted results are: both may insert the same attempt.
            VersionRepository(connection).run(run.id, lock=True)
            GateRepository(connection).save_results(run.id, version, suite, results, now=now)

        await job.complete(save, result={"status": answer.status, "results": len(results)})
        self._signals.events.notify()
        return None


def _secret_owner(run: RunView) -> str:
    return f"evaluation {run.id}"


def results_in(answer: Answer) -> list[dict[str, Any]]:
    """Return the results of an evaluator's answer; none if it will post them (202 or 204). Raise JobFailure."""
    if answer.problem is not None:
        raise JobFailure(f"the evaluator: {answer.problem}")
    if answer.status in (202, 204):
        return []
    if answer.is_cut:
        raise JobFailure(f"the evaluator's answer has more than {_ANSWER_BYTES >> 20} MiB: answer 202 and post parts")
    try:
        return [result.model_dump() for result in ResultsBody.model_validate_json(answer.body).results]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise JobFailure(
            f'the evaluator\'s answer is not {{"results": [{{"task", "reward"}} …]}}: {where}: {first["msg"]}'
        ) from error


def _is_withdrawn(connection: Connection, run: RunView, version: int) -> bool:
    row = VersionRepository(connection).find(run.id, version)
    return row is None or row.state in WITHDRAWN
