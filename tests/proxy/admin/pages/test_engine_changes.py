"""The forms that add, drain, resume and remove engines, on a whole proxy."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.database import sqlite_database
from tests.proxy.admin.visiting import OWN
from tests.proxy.serving.test_endpoints import SECOND, Pool, is_in_state, listed, until
from tests.proxy.test_app import ADMIN, RUN
from tests.proxy.tokens.models import write_model


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return Pool(tmp_path, sqlite_database(tmp_path), write_model(tmp_path / "model"))


async def post(client: httpx.AsyncClient, path: str, **form: str) -> httpx.Response:
    return await client.post(f"/admin/{path}", data=form, headers=OWN)


async def test_an_engine_is_added_drained_resumed_and_removed(pool: Pool) -> None:
    async with pool.proxy() as client:
        await client.post("/admin/login", data={"key": ADMIN}, headers=OWN)
        added = await post(
            client, "new-engine", name="second", url=f"{SECOND}/", kind="sglang", run="policy", base_model=""
        )
        assert (added.status_code, added.headers["location"]) == (303, "/admin/engines")
        await until(lambda: is_in_state(client, "second", "ready"))
        assert (await post(client, "engines/second/drain")).status_code == 303
        page = (await client.get("/admin/engines")).text
        assert 'id="resume-second"' in page
        assert 'id="remove-second"' in page
        assert 'id="remove-engine"' not in page  # its configuration would add it again
        assert (await post(client, "engines/second/resume")).status_code == 303
        assert (await listed(client))["second"]["desired"] == "serving"

        asked = (await client.get("/admin/engines/second/remove")).text
        assert "It is not drained" in asked
        assert (await post(client, "engines/second/remove")).status_code == 409
        assert (await post(client, "engines/second/remove", force="true")).status_code == 303
        assert set(await listed(client)) == {"engine"}
        assert (await client.get("/admin/engines/second/remove")).status_code == 404


async def test_what_would_end_a_runs_service_is_asked_first(pool: Pool) -> None:
    async with pool.proxy() as client:
        await client.post("/admin/login", data={"key": ADMIN}, headers=OWN)
        refused = await post(client, "engines/engine/drain")
        assert refused.status_code == 409
        assert 'name="force" value="true"' in refused.text
        assert "no engine would serve the run" in refused.text
        assert (await listed(client))["engine"]["desired"] == "serving"
        assert (await post(client, "engines/engine/drain", force="true")).status_code == 303
        assert (await listed(client))["engine"]["desired"] in ("draining", "drained")
        configured = await post(client, "engines/engine/remove", force="true")
        assert (configured.status_code, "take it out there" in configured.text) == (409, True)
        assert 'name="force"' not in configured.text


async def test_an_error_stands_beside_its_field(pool: Pool) -> None:
    async with pool.proxy() as client:
        await client.post("/admin/login", data={"key": ADMIN}, headers=OWN)
        good = {"name": "second", "url": SECOND}
        for field, value, status in (
            ("name", "engine", 400),
            ("name", "<b>", 400),
            ("url", "nowhere", 400),
            ("url", "http://first.test:1", 409),
            ("run", "unknown", 400),
            ("kind", "odd", 400),
        ):
            reply = await post(client, "new-engine", **good | {field: value})
            assert reply.status_code == status, (field, value, reply.text)
            assert f'id="{field}-problem"' in reply.text, (field, value)
            assert "<b>" not in reply.text
        assert set(await listed(client)) == {"engine"}


async def test_only_an_admins_own_page_changes_engines(pool: Pool) -> None:
    async with pool.proxy() as client:
        await client.post("/admin/login", data={"key": ADMIN}, headers=OWN)
        for headers in ({}, {"origin": "https://elsewhere.test"}):
            for path in ("new-engine", "engines/engine/drain"):
                assert (await client.post(f"/admin/{path}", headers=headers)).status_code == 403
        await client.post("/admin/login", data={"key": RUN}, headers=OWN)
        for path in ("new-engine", "engines/engine/drain", "engines/engine/resume", "engines/engine/remove"):
            assert (await post(client, path)).status_code == 403, path
        for path in ("new-engine", "engines/engine/remove"):
            assert (await client.get(f"/admin/{path}")).status_code == 403, path
        assert (await listed(client))["engine"]["desired"] == "serving"
