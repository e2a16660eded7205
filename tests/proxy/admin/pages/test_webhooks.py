"""The pages of webhooks."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from proxy.auth.service import PrincipalKind
from proxy.http.services import provide
from tests.proxy.admin.visiting import OWN, enter
from tests.proxy.overview.site import Site
from tests.proxy.webhooks.world import Webhooks, open_webhooks

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
async def webhooks(site: Site) -> AsyncIterator[Webhooks]:
    async with open_webhooks(site.database) as opened:
        provide(site.app, opened.service)
        yield opened


async def test_a_webhook_is_shown_with_its_deliveries_and_delivers_again(site: Site, webhooks: Webhooks) -> None:
    await enter(site)
    assert "No webhook yet" in (await site.client.get("/admin/webhooks")).text
    made = await webhooks.create("run", label=HOSTILE)
    path = f"/admin/webhooks/{made.webhook.id}"
    assert "Nothing was sent yet" in (await site.client.get(path)).text
    webhooks.status = 410
    await webhooks.happen("run.paused")
    await webhooks.deliver()
    for page in ((await site.client.get("/admin/webhooks")).text, (await site.client.get(path)).text):
        assert HOSTILE not in page
        assert made.secret not in page
        assert "it wants no more" in page
    dead = re.findall(r'id="again-(\w+)"', (await site.client.get(f"{path}?dead=true")).text)
    assert len(dead) == 1
    webhooks.status = 200
    again = f"{path}/deliveries/{dead[0]}/redeliver"
    for address, expected in ((f"{path}/enable", 303), (again, 303), (again, 409)):
        assert (await site.client.post(address, headers=OWN)).status_code == expected
    assert (await site.client.post(f"{path}/test", headers=OWN)).status_code == 303
    await webhooks.deliver()
    assert sorted(webhooks.types) == ["run.paused", "run.paused", "webhook.test"]
    assert "No delivery is dead" in (await site.client.get(f"{path}?dead=true")).text
    assert (await site.client.post(f"{path}/disable", headers=OWN)).status_code == 303
    assert not (await webhooks.service.get(made.webhook.id)).enabled


async def test_deliveries_are_paged(site: Site, webhooks: Webhooks) -> None:
    await enter(site)
    made = await webhooks.create("run")
    for _ in range(21):
        await webhooks.happen("run.paused")
    await webhooks.follower.follow()
    path = f"/admin/webhooks/{made.webhook.id}"
    first = (await site.client.get(path)).text
    older = re.findall(r'id="older" href="([^"]+)"', first)[0].replace("&amp;", "&")
    second = (await site.client.get(older)).text
    assert [page.count("/admin/jobs/job_") for page in (first, second)] == [20, 1]
    assert 'id="newest"' in second


async def test_only_an_admins_own_page_shows_and_changes_webhooks(
    site: Site, run_id: str, webhooks: Webhooks
) -> None:
    made = await webhooks.create("run")
    await enter(site)
    assert (await site.client.post(f"/admin/webhooks/{made.webhook.id}/disable")).status_code == 403
    assert (await site.client.get("/admin/webhooks/whk_none")).status_code == 404
    await enter(site, PrincipalKind.RUN, run_id)
    for path in ("webhooks", f"webhooks/{made.webhook.id}"):
        assert (await site.client.get(f"/admin/{path}")).status_code == 403
