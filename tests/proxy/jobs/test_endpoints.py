"""Jobs over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from proxy.auth.service import Credentials, PrincipalKind
from proxy.http import errors
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.jobs import endpoints
from proxy.jobs.kinds import JobRefused, RunningJob
from proxy.runs.service import RunDirectory
from tests.fakes.run_history import add_run
from tests.proxy.jobs.world import Jobs
from tests.running_app import bearer

PATH = "/api/v1/jobs"


@pytest.fixture
async def client(jobs: Jobs) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    credentials = Credentials(jobs.database, b"s" * 32, jobs.clock)
    provide(app, jobs.service, credentials, RunDirectory(jobs.database, jobs.clock))
    errors.install(app)
    add_routes(app, endpoints.router)
    key = await credentials.create(PrincipalKind.ADMIN, run_id=None)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy.test", headers=bearer(key.text)) as http:
        yield http


async def _refuse(_job: RunningJob) -> None:
    raise JobRefused("its subject is gone")


async def test_pages_follow_each_other_and_filters_apply(jobs: Jobs, client: httpx.AsyncClient) -> None:
    run_id = await add_run(jobs.database)
    jobs.kind("it")
    mine = await jobs.add("it", "a", "b", "c", run_id=run_id)
    (other,) = await jobs.add("other", "a")
    await jobs.run_due(jobs.runner(), want=1)
    seen: list[str] = []
    cursor = None
    while True:
        page = (await client.get(PATH, params={"limit": 1} | ({"cursor": cursor} if cursor else {}))).json()
        seen += [job["id"] for job in page["jobs"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == sorted([*mine, other], reverse=True)
    for filters, count in (({"kind": "other"}, 1), ({"run": "calculator"}, 3), ({"state": "done"}, 1)):
        assert len((await client.get(PATH, params=filters)).json()["jobs"]) == count, filters
    assert (await client.get(PATH, params={"state": "odd"})).status_code == 400
    assert (await client.get(PATH, params={"cursor": "odd"})).status_code == 400
    assert (await client.get(PATH, params={"run": "odd"})).status_code == 404


async def test_a_dead_job_is_shown_with_its_reason_and_tried_again(jobs: Jobs, client: httpx.AsyncClient) -> None:
    jobs.kind("it", _refuse)
    (job_id,) = await jobs.add("it", "a")
    waiting = await client.post(f"{PATH}/{job_id}/retry")
    assert waiting.status_code == 409
    assert "job is waiting" in waiting.json()["error"]["message"].replace(job_id + " ", "")
    await jobs.run_due(jobs.runner())
    (listed,) = (await client.get(PATH, params={"state": "dead"})).json()["jobs"]
    assert (listed["id"], listed["error"], listed["attempts"]) == (job_id, "its subject is gone", 1)
    retried = (await client.post(f"{PATH}/{job_id}/retry")).json()
    assert (retried["state"], retried["attempts"], retried["finished_at"]) == ("waiting", 0, None)
    await jobs.run_due(jobs.runner())
    assert (await client.post(f"{PATH}/retry", params={"kind": "other"})).json() == {"retried": 0}
    assert (await client.post(f"{PATH}/retry", params={"kind": "it"})).json() == {"retried": 1}
    assert [event["job"] for event in await jobs.events("job.retried")] == [job_id, job_id]


async def test_a_waiting_job_is_cancelled_and_a_done_one_is_not(jobs: Jobs, client: httpx.AsyncClient) -> None:
    jobs.kind("it")
    first, second = await jobs.add("it", "a", "b")
    assert (await client.post(f"{PATH}/{first}/cancel")).json()["state"] == "cancelled"
    assert (await client.post(f"{PATH}/{first}/cancel")).status_code == 409
    await jobs.run_due(jobs.runner())
    assert (await client.get(f"{PATH}/{second}")).json()["state"] == "done"
    assert (await client.post(f"{PATH}/{second}/cancel")).status_code == 409
    assert (await client.post(f"{PATH}/{second}/retry")).status_code == 409
    assert await jobs.effects() == [second]
    missing = await client.get(f"{PATH}/job_none")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "job_id")


async def test_kinds_and_schedules_are_listed(jobs: Jobs, client: httpx.AsyncClient) -> None:
    jobs.kind("it", concurrency=3)
    await jobs.add("it", "a")
    jobs.clock.now += 5
    answer = (await client.get(f"{PATH}/kinds")).json()
    (kind,) = answer["kinds"]
    assert (kind["kind"], kind["waiting"], kind["oldest_seconds"], kind["concurrency"]) == ("it", 1, 5, 3)
    assert answer["schedules"] == []


async def test_other_keys_are_refused(jobs: Jobs, client: httpx.AsyncClient) -> None:
    run_id = await add_run(jobs.database)
    credentials = Credentials(jobs.database, b"s" * 32, jobs.clock)
    for kind in (PrincipalKind.RUN, PrincipalKind.TRAINER):
        key = await credentials.create(kind, run_id=run_id)
        for path in ("", "/kinds", "/job_none"):
            assert (await client.get(PATH + path, headers=bearer(key.text))).status_code == 403
        assert (await client.post(f"{PATH}/retry", headers=bearer(key.text))).status_code == 403
    assert (await client.get(PATH, headers={"authorization": ""})).status_code == 401
