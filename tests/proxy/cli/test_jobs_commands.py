"""`base-rl jobs …` with a real server, and `base-rl worker` without a broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.auth.service import PrincipalKind
from proxy.cli.commands import app
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.jobs import endpoints
from proxy.jobs.kinds import JobRefused, RunningJob
from tests.database import sqlite_database
from tests.fakes.run_history import NOW
from tests.proxy.jobs.world import Jobs
from tests.proxy.overview.serving import serving
from tests.proxy.overview.site import open_site


class Installation:
    """A server with jobs."""

    def __init__(self, jobs: Jobs, url: str, key: str) -> None:
        self.jobs = jobs
        self._place = ("--url", url, "--api-key", key)

    async def run(self, *arguments: str, status: int = 0) -> str:
        runner = CliRunner(env={"COLUMNS": "300"})
        result = await asyncio.to_thread(runner.invoke, app, ["jobs", *arguments, *self._place])
        assert result.exit_code == status, result.output
        return result.output


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Installation]:
    async with open_site(sqlite_database(tmp_path), tmp_path, clock=lambda: NOW) as site:
        jobs = Jobs(site.database)
        provide(site.app, jobs.service)
        add_routes(site.app, endpoints.router)
        key = await site.credentials.create(PrincipalKind.ADMIN, run_id=None)
        async with serving(site) as address:
            yield Installation(jobs, address, key.text)


async def _refuse(_job: RunningJob) -> None:
    raise JobRefused("its subject is gone")


async def test_a_dead_job_is_found_shown_retried_and_cancelled(here: Installation) -> None:
    here.jobs.kind("judge", _refuse)
    (job_id,) = await here.jobs.add("judge", "a")
    await here.jobs.run_due(here.jobs.runner())
    listed = await here.run("list", "--state", "dead")
    assert job_id in listed
    assert "its subject is gone" in listed
    (one,) = json.loads(await here.run("list", "--kind", "judge", "--json"))
    assert json.loads(await here.run("show", job_id)) == one
    kinds = await here.run("kinds")
    assert [line.split()[:5] for line in kinds.splitlines()[1:2]] == [["judge", "0", "0", "0", "1"]]
    assert "1 dead jobs are due now" in await here.run("retry", "--dead", "--kind", "judge")
    assert "is waiting" in await here.run("retry", job_id, status=1)
    assert f"{job_id} is cancelled" in await here.run("cancel", job_id)
    assert f"{job_id} is due now" in await here.run("retry", job_id)


async def test_retry_needs_one_job_or_the_dead_ones(here: Installation) -> None:
    for wrong in ((), ("job_1", "--dead"), ("job_1", "--kind", "judge")):
        assert "name a job, or give --dead" in await here.run("retry", *wrong, status=1)


def test_a_worker_needs_a_broker(tmp_path: Path) -> None:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["worker", "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "jobs.broker: no broker is named" in result.output
    broken = {"BASE_RL_JOBS__BROKER": "amqp://user:secret@here"}
    result = CliRunner(env={"COLUMNS": "300", **broken}).invoke(app, ["worker", "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "write redis://" in result.output
    assert "secret" not in result.output
