"""The pages of background jobs."""

from __future__ import annotations

import re

import pytest

from proxy.auth.service import PrincipalKind
from proxy.http.services import provide
from proxy.jobs.kinds import JobRefused, RunningJob
from tests.proxy.admin.visiting import OWN, enter
from tests.proxy.jobs.world import Jobs
from tests.proxy.overview.site import Site

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def jobs(site: Site) -> Jobs:
    made = Jobs(site.database)
    provide(site.app, made.service)
    return made


async def _refuse(_job: RunningJob) -> None:
    raise JobRefused(HOSTILE)


async def test_dead_jobs_are_shown_with_their_error_and_tried_again(site: Site, jobs: Jobs) -> None:
    await enter(site)
    assert "No job yet" in (await site.client.get("/admin/jobs")).text
    jobs.kind("judge", _refuse)
    first, second = await jobs.add("judge", "a", "b")
    waiting = (await site.client.get("/admin/jobs")).text
    assert "Try" not in waiting
    await jobs.run_due(jobs.runner())
    page = (await site.client.get("/admin/jobs")).text
    assert HOSTILE not in page
    assert page.count("&lt;script&gt;") == 2
    assert "<b>2</b> jobs are dead" in page

    assert (await site.client.post(f"/admin/jobs/{first}/retry", headers=OWN)).status_code == 303
    assert [(await jobs.service.show(job)).state for job in (first, second)] == ["waiting", "dead"]
    refused = await site.client.post(f"/admin/jobs/{first}/retry", headers=OWN)
    assert (refused.status_code, 'role="alert"' in refused.text) == (409, True)
    assert (await site.client.post("/admin/jobs/retry", data={"kind": "judge"}, headers=OWN)).status_code == 303
    assert (await jobs.service.show(second)).state == "waiting"
    assert (await site.client.post(f"/admin/jobs/{second}/cancel", headers=OWN)).status_code == 303
    assert (await jobs.service.show(second)).state == "cancelled"
    assert (await site.client.get("/admin/jobs/job_none")).status_code == 404


async def test_jobs_are_filtered_and_paged_and_refreshed_only_when_changed(site: Site, jobs: Jobs) -> None:
    await enter(site)
    jobs.kind("judge")
    ids = await jobs.add("judge", *(str(number) for number in range(21)))
    first = (await site.client.get("/admin/jobs?kind=judge")).text
    assert ids[0] not in first
    older = re.findall(r'id="older" href="([^"]+)"', first)[0].replace("&amp;", "&")
    assert ids[0] in (await site.client.get(older)).text
    assert "No job matches" in (await site.client.get("/admin/jobs?state=dead")).text
    for query in ("state=odd", "cursor=odd"):
        assert (await site.client.get(f"/admin/jobs?{query}")).status_code == 400
    seen = re.findall(r'"x-seen": "(\w+)"', first)[0]
    headers = {"x-seen": seen}
    jobs.clock.now += 5  # nothing but ages changed
    assert (await site.client.get("/admin/jobs?kind=judge", headers=headers)).status_code == 204
    await jobs.run_due(jobs.runner(), want=1)
    assert (await site.client.get("/admin/jobs?kind=judge", headers=headers)).status_code == 200


async def test_only_an_admins_own_page_changes_jobs(site: Site, run_id: str, jobs: Jobs) -> None:
    jobs.kind("judge")
    (job,) = await jobs.add("judge", "a")
    await enter(site)
    assert (await site.client.post(f"/admin/jobs/{job}/cancel")).status_code == 403
    await enter(site, PrincipalKind.RUN, run_id)
    for path in ("jobs", f"jobs/{job}"):
        assert (await site.client.get(f"/admin/{path}")).status_code == 403
    for path in ("jobs/retry", f"jobs/{job}/retry", f"jobs/{job}/cancel"):
        assert (await site.client.post(f"/admin/{path}", headers=OWN)).status_code == 403
    assert (await jobs.service.show(job)).state == "waiting"
