"""The page of the event log."""

from __future__ import annotations

from functools import partial

from proxy.auth.service import PrincipalKind
from proxy.lifecycle.events import append_event
from tests.fakes.run_history import NOW, add_run
from tests.proxy.admin.visiting import enter
from tests.proxy.overview.site import Site

HOSTILE = "<img src=x onerror=alert(1)>"


async def test_the_log_is_filtered_and_paged_and_hostile_text_stays_text(site: Site, run_id: str) -> None:
    data = {"reason": HOSTILE, "list": [HOSTILE], "none": None}
    await site.database.commit(partial(append_event, run_id=run_id, kind="run.paused", data=data, now=NOW))
    await site.database.commit(partial(append_event, run_id=None, kind="engine.lost", data={}, now=NOW))
    await enter(site)
    page = (await site.client.get("/admin/events")).text
    assert page.index("engine lost") < page.index("run paused") < page.index("version served")
    assert HOSTILE not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    own = (await site.client.get("/admin/events?run=calculator&kind=run.paused")).text
    assert "run paused" in own
    assert "engine lost" not in own
    assert "No event matches" in (await site.client.get("/admin/events?kind=nothing")).text
    for _ in range(50):
        await site.database.commit(partial(append_event, run_id=run_id, kind="claim.leased", data={}, now=NOW))
    first = (await site.client.get("/admin/events?kind=claim")).text
    assert first.count("claim leased") == 50
    assert "Older" not in first
    older = (await site.client.get("/admin/events")).text.split("/admin/events?cursor=")[1].split('"')[0]
    second = (await site.client.get(f"/admin/events?cursor={older}")).text
    assert ("engine lost" in second, "Newest" in second) == (True, True)


async def test_a_run_key_sees_only_the_events_of_its_run(site: Site, run_id: str) -> None:
    await add_run(site.database, name="secret-run")
    await site.database.commit(
        partial(append_event, run_id=None, kind="run.deleted", data={"name": "gone-run"}, now=NOW)
    )
    await enter(site, PrincipalKind.RUN, run_id)
    page = (await site.client.get("/admin/events")).text
    assert "calculator" in page
    assert "secret-run" not in page
    assert "gone-run" not in page
    assert (await site.client.get("/admin/events?run=secret-run")).status_code == 404
