from __future__ import annotations

from typing import Any

import httpx
import pytest

from proxy.auth.service import PrincipalKind
from tests.fakes.run_history import NOW, add_run, add_session
from tests.proxy.overview.site import Site


async def get(site: Site, path: str, kind: PrincipalKind, run_id: str | None = None) -> httpx.Response:
    return await site.client.get(path, headers=await site.key(kind, run_id))


async def rewards(site: Site, path: str, kind: PrincipalKind, run_id: str | None = None) -> list[dict[str, Any]]:
    reply = await get(site, path, kind, run_id)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["rewards"]
    return found


async def test_who_sees_which_runs_entries(site: Site) -> None:
    one, other = await add_run(site.database, name="one"), await add_run(site.database, name="other")
    mine = await add_session(site.database, one, now=NOW, reward=1.0, external_id="attempt-1")
    theirs = await add_session(site.database, other, now=NOW + 1, reward=0.0, external_id="attempt-1")

    def sessions(entries: list[dict[str, Any]]) -> list[str]:
        return [entry["session_id"] for entry in entries]

    admin, run = PrincipalKind.ADMIN, PrincipalKind.RUN
    assert sessions(await rewards(site, "/api/v1/rewards", admin)) == [theirs, mine]
    assert sessions(await rewards(site, "/api/v1/rewards?run=one", admin)) == [mine]
    assert [entry["external_id"] for entry in await rewards(site, "/api/v1/rewards", admin)] == ["attempt-1"] * 2
    assert sessions(await rewards(site, "/api/v1/rewards?run=other&session=attempt-1", admin)) == [theirs]
    assert sessions(await rewards(site, f"/api/v1/rewards?session={mine}", admin)) == [mine]
    assert sessions(await rewards(site, "/api/v1/rewards", run, one)) == [mine]
    assert sessions(await rewards(site, "/api/v1/rewards?session=attempt-1", run, one)) == [mine]
    assert (await get(site, "/api/v1/rewards?run=other", run, one)).status_code == 404
    assert (await get(site, f"/api/v1/rewards?session={theirs}", run, one)).status_code == 404
    assert (await get(site, "/api/v1/rewards", PrincipalKind.TRAINER, one)).status_code == 403
    assert (await site.client.get("/api/v1/rewards")).status_code == 401


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("since=yesterday", "since"),
        ("since=nan", "since"),
        ("after_training=perhaps", "after_training"),
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("cursor=x", "cursor"),
    ],
)
@pytest.mark.parametrize("path", ["/api/v1/rewards", "/api/v1/runs/calculator/rewards"])
async def test_wrong_filters_are_refused_by_name(site: Site, run_id: str, path: str, query: str, param: str) -> None:
    reply = await get(site, f"{path}?{query}", PrincipalKind.ADMIN)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_a_page_continues_where_the_previous_one_ended(site: Site, run_id: str) -> None:
    first = (await get(site, "/api/v1/rewards?limit=60&name=reward", PrincipalKind.ADMIN)).json()
    rest = (
        await get(site, f"/api/v1/rewards?limit=60&name=reward&cursor={first['next_cursor']}", PrincipalKind.ADMIN)
    ).json()
    found = [entry["id"] for entry in first["rewards"] + rest["rewards"]]
    assert (len(found), len(set(found)), rest["next_cursor"]) == (101, 101, None)
    assert (await get(site, "/api/v1/runs/calculator/rewards/revised", PrincipalKind.ADMIN)).json() == {
        "sessions": [],
        "next_cursor": None,
    }
