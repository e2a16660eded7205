"""Keys over HTTP. Those of one run are in `tests/proxy/overview/test_endpoints.py`."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.auth.service import PrincipalKind
from tests.proxy.overview.site import Site
from tests.running_app import bearer

PATH = "/api/v1/keys"


async def test_an_admin_key_is_created_listed_rotated_and_revoked(site: Site) -> None:
    admin = await site.key(PrincipalKind.ADMIN)
    made = await site.client.post(PATH, headers=admin, json={"kind": "admin", "label": "ada"})
    assert made.status_code == 201
    key = made.json()
    assert (await site.client.get("/api/v1/health", headers=bearer(key["key"]))).status_code == 200
    rotated = await site.client.post(f"{PATH}/{key['id']}/rotate", headers=admin)
    assert rotated.status_code == 201
    new = rotated.json()
    assert (new["replaces"], new["kind"], new["label"]) == (key["id"], "admin", "ada")
    assert (await site.client.get("/api/v1/health", headers=bearer(key["key"]))).status_code == 401
    assert (await site.client.get("/api/v1/health", headers=bearer(new["key"]))).status_code == 200
    listed = await site.client.get(PATH, headers=admin, params={"revoked": "true"})
    states = {one["id"]: one["revoked_at"] is None for one in listed.json()["keys"]}
    assert (states[key["id"]], states[new["id"]]) == (False, True)
    assert key["key"] not in listed.text
    assert new["key"] not in listed.text
    assert (await site.client.delete(f"{PATH}/{new['id']}", headers=admin)).status_code == 204
    assert (await site.client.get("/api/v1/health", headers=bearer(new["key"]))).status_code == 401


async def test_the_last_admin_key_stays_with_a_sentence(site: Site) -> None:
    admin = await site.key(PrincipalKind.ADMIN)
    own = (await site.client.get(f"{PATH}/self", headers=admin)).json()["id"]
    refused = await site.client.delete(f"{PATH}/{own}", headers=admin)
    assert refused.status_code == 409
    assert "create another one first" in refused.json()["error"]["message"]
    assert (await site.client.get(PATH, headers=admin)).status_code == 200


async def test_every_kind_is_listed_and_pages_follow_each_other(site: Site, run_id: str) -> None:
    admin = await site.key(PrincipalKind.ADMIN)
    for kind in (PrincipalKind.RUN, PrincipalKind.TRAINER, PrincipalKind.SESSION):
        await site.credentials.create(kind, run_id=run_id)
    seen: list[str] = []
    cursor: str | None = None
    while True:
        params = {"limit": "1"} | ({} if cursor is None else {"cursor": cursor})
        page = (await site.client.get(PATH, headers=admin, params=params)).json()
        seen += [one["kind"] for one in page["keys"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(seen) == ["admin", "run", "trainer"]
    sessions = (await site.client.get(PATH, headers=admin, params={"kind": "session"})).json()["keys"]
    assert [one["kind"] for one in sessions] == ["session"]
    of_run = (await site.client.get(PATH, headers=admin, params={"run": "calculator"})).json()["keys"]
    assert {one["kind"] for one in of_run} == {"run", "trainer"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kind": "session"}, "kind"),
        ({"kind": "run"}, "run"),
        ({"kind": "admin", "run": "calculator"}, "run"),
        ({"kind": "admin", "label": "bootstrap"}, "label"),
        ({"kind": "admin", "scope": 1}, "scope"),
    ],
)
async def test_keys_that_make_no_sense_are_refused_by_field(
    site: Site, run_id: str, body: dict[str, Any], param: str
) -> None:
    reply = await site.client.post(PATH, headers=await site.key(PrincipalKind.ADMIN), json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("grace", [-1, "NaN", 1e12, "soon"])
async def test_a_grace_that_makes_no_sense_is_refused(site: Site, grace: Any) -> None:
    admin = await site.key(PrincipalKind.ADMIN)
    own = (await site.client.get(f"{PATH}/self", headers=admin)).json()["id"]
    reply = await site.client.post(f"{PATH}/{own}/rotate", headers=admin, json={"grace_seconds": grace})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "grace_seconds")


@pytest.mark.parametrize("kind", [PrincipalKind.RUN, PrincipalKind.TRAINER, PrincipalKind.SESSION])
async def test_only_admin_keys_manage_keys(site: Site, run_id: str, kind: PrincipalKind) -> None:
    key = await site.key(kind, run_id)
    own = await site.client.get(f"{PATH}/self", headers=key)
    assert (own.status_code, own.json()["kind"]) == (200, kind.value)
    path = f"{PATH}/{own.json()['id']}"
    for method, where in (("GET", PATH), ("POST", PATH), ("POST", f"{path}/rotate"), ("DELETE", path)):
        assert (await site.client.request(method, where, headers=key)).status_code == 403
