from __future__ import annotations

from functools import partial

import pytest

from proxy.auth.service import PrincipalKind
from proxy.errors import InvalidRequest
from proxy.lifecycle.events import append_event
from proxy.overview.log import service
from proxy.overview.log.views import EventFilter
from tests.fakes.run_history import NOW, add_run
from tests.proxy.overview.site import Site


async def append(site: Site, run_id: str | None, *kinds: str) -> None:
    for kind in kinds:
        write = partial(append_event, run_id=run_id, kind=kind, data={}, now=NOW)
        await site.database.commit(write)


async def kinds_of(site: Site, wanted: EventFilter, limit: int = 2) -> list[str]:
    """Read the log page by page and return all kinds."""
    kinds: list[str] = []
    cursor: str | None = None
    while True:
        page = await site.overview.log.page(wanted, cursor=cursor, limit=limit)
        assert len(page.events) <= limit
        kinds += [event.kind for event in page.events]
        if (cursor := page.next_cursor) is None:
            return kinds


@pytest.mark.parametrize("searched", [1, 3, 1000])
async def test_pages_hold_every_matching_event_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, searched: int
) -> None:
    monkeypatch.setattr(service, "_SEARCHED", searched)
    first, second = await add_run(site.database, name="first"), await add_run(site.database, name="second")
    await append(site, first, "run.paused", "version.served", "runaway.x")
    await append(site, second, "run.paused")
    await append(site, None, "run.deleted", "run_.x")
    assert await kinds_of(site, EventFilter()) == [
        "run_.x", "run.deleted", "run.paused", "runaway.x", "version.served", "run.paused", "run.created",
        "run.created",
    ]  # fmt: skip
    by_domain = ["run.deleted", "run.paused", "run.paused", "run.created", "run.created"]
    assert await kinds_of(site, EventFilter(kind="run")) == by_domain
    assert await kinds_of(site, EventFilter(kind="run.paused", run_ids=(first,))) == ["run.paused"]
    assert await kinds_of(site, EventFilter(run_ids=(first, second)), limit=50) == [
        "run.paused", "runaway.x", "version.served", "run.paused", "run.created", "run.created",
    ]  # fmt: skip
    assert await kinds_of(site, EventFilter(kind="%")) == []
    named = (await site.overview.log.page(EventFilter(kind="version.served"), limit=50)).events
    assert [event.run for event in named] in ([], ["first"])


@pytest.mark.parametrize("cursor", ["", "x", "-1", "9" * 30, "9223372036854775808", "²"])
async def test_invalid_cursors_are_refused(site: Site, cursor: str) -> None:
    with pytest.raises(InvalidRequest):
        await site.overview.log.page(EventFilter(), cursor=cursor)


async def test_the_log_over_http(site: Site, run_id: str) -> None:
    await add_run(site.database, name="other")
    admin, own = await site.key(PrincipalKind.ADMIN), await site.key(PrincipalKind.RUN, run_id)
    page = (await site.client.get("/api/v1/events?limit=3", headers=admin)).json()
    assert page["events"][0]["run"] == "other"
    assert set(page["events"][0]) == {"id", "kind", "run_id", "run", "data", "created_at"}
    older = (await site.client.get(f"/api/v1/events?limit=3&cursor={page['next_cursor']}", headers=admin)).json()
    assert older["events"][0]["id"] < page["events"][-1]["id"]
    mine = (await site.client.get("/api/v1/events?kind=run", headers=own)).json()["events"]
    assert [event["run"] for event in mine] == ["calculator"]
    assert (await site.client.get("/api/v1/events?run=other", headers=own)).status_code == 404
    assert (await site.client.get("/api/v1/events?run=nowhere", headers=admin)).status_code == 404
    assert (await site.client.get("/api/v1/events?cursor=x", headers=admin)).status_code == 400
    assert (await site.client.get("/api/v1/events")).status_code == 401
