"""The page of all runs."""

from __future__ import annotations

import asyncio
import re

import pytest

from proxy.auth.service import PrincipalKind
from proxy.overview.views import EngineView
from tests.fakes.run_history import NOW, add_run, add_session
from tests.proxy.admin.visiting import enter
from tests.proxy.overview.site import Site


def shown(text: str) -> list[str]:
    """Return the names of the listed runs."""
    return re.findall(r'id="run-\w+" href="/admin/runs/([^"]+)"', text)


async def test_a_row_shows_curve_engines_and_waiting_trajectories(site: Site, run_id: str) -> None:
    site.serving.engines = (
        EngineView(
            name="gpu-2", url="http://e", base_model="b", state="not_ready", problem="it is <gone>",
            versions={"calculator": 5}, outstanding_tokens=0,
        ),
    )  # fmt: skip
    await enter(site)
    page = (await site.client.get("/admin")).text
    assert shown(page) == ["calculator"]
    assert re.search(r'<polyline points="[\d., ]+"', page)
    assert 'title="it is &lt;gone&gt;">gpu-2</span>' in page
    assert "v6" in page


async def test_filters_by_name_model_and_state(site: Site) -> None:
    for number, name in enumerate(("alpha", "beta", "gamma")):
        await add_run(site.database, name=name, now=NOW + number)
    await site.switch.pause("beta")
    await site.switch.archive("gamma")
    await enter(site)
    for query, names in (
        ("", ["beta", "alpha"]),
        ("?q=ALP", ["alpha"]),
        ("?q=calculator", ["beta", "alpha"]),
        ("?state=paused", ["beta"]),
        ("?state=archived", ["gamma"]),
        ("?state=all", ["gamma", "beta", "alpha"]),
        ("?q=%3Cscript%3E", []),
    ):
        page = (await site.client.get(f"/admin{query}")).text
        assert shown(page) == names, query
        assert "<script>&" not in page
    assert (await site.client.get("/admin?state=odd")).status_code == 400


async def test_two_hundred_runs_come_in_pages(site: Site) -> None:
    for number in range(101):
        await add_run(site.database, name=f"r{number:03}", now=NOW + number)
    await enter(site)
    first = (await site.client.get("/admin")).text
    assert (len(shown(first)), shown(first)[0]) == (100, "r100")
    assert "101 runs, page 1 of 2" in first
    second = (await site.client.get("/admin?page=2")).text
    assert shown(second) == ["r000"]
    assert shown((await site.client.get("/admin?page=9")).text) == ["r000"]


async def test_a_refresh_without_news_is_empty(site: Site, run_id: str) -> None:
    await enter(site)
    page = (await site.client.get("/admin")).text
    seen = re.findall(r"hx-headers='{\"x-seen\": \"(\w+)\"}'", page)[0]
    headers = {"hx-request": "true", "x-seen": seen}
    assert (await site.client.get("/admin", headers=headers)).status_code == 204
    await add_session(site.database, run_id, now=NOW, reward=0.5)
    async with asyncio.timeout(20):  # the figures are cached for twenty times what counting them took
        while (changed := await site.client.get("/admin", headers=headers)).status_code == 204:
            await asyncio.sleep(0.01)
    assert (changed.status_code, seen in changed.text) == (200, False)


@pytest.mark.parametrize("with_run", [False, True])
async def test_empty_states(site: Site, with_run: bool) -> None:
    await enter(site)
    if with_run:
        await add_run(site.database)
    page = (await site.client.get("/admin")).text
    assert ("No runs yet" in page) is not with_run
    assert "No run matches" in (await site.client.get("/admin?q=zzz")).text


async def test_a_run_key_sees_its_run_without_the_problems_of_others(site: Site, run_id: str) -> None:
    await add_run(site.database, name="secret-run")
    site.serving.lines = ["the run 'secret-run' has no engine"]
    await enter(site, PrincipalKind.RUN, run_id)
    page = (await site.client.get("/admin?state=all")).text
    assert shown(page) == ["calculator"]
    assert "secret-run" not in page
    assert "New run" not in page
