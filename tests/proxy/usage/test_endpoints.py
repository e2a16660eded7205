"""Limits of projects and keys over HTTP: set, enforced on model calls, and shown with their use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from proxy.app import create_app
from proxy.settings import BootstrapSettings, LimitSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.tokens.models import write_model
from tests.running_app import bearer, running, until_ready

ADMIN = bearer("rl-admin-chosen")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A proxy with the runs `a` and `b` of the project `shop`, and `other` of another project."""
    model = str(write_model(tmp_path / "model"))

    def run(name: str, project: str, **limits: Any) -> RunSettings:
        return RunSettings(name=name, model=model, project=project, limits=LimitSettings(**limits))

    app = create_app(
        Settings(
            server=ServerSettings(data_dir=tmp_path / "data"),
            bootstrap=BootstrapSettings(admin_key=SecretStr("rl-admin-chosen")),
            run=run("a", "shop", tokens_per_month=1000),
            runs={"b": run("b", "shop"), "other": run("other", "elsewhere", calls_per_minute=60)},
        ),
        engine=FakeEngine(lambda _request: [5, 6, 2], model_path=model, label="default"),
    )
    async with running(app) as found:
        await until_ready(found)
        yield found


async def made(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post("/api/v1/keys", headers=ADMIN, json=body)
    assert reply.status_code == 201, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def call(client: httpx.AsyncClient, key: str, run: str = "a") -> httpx.Response:
    body = {"model": run, "messages": [{"role": "user", "content": "Hello"}]}
    return await client.post("/v1/chat/completions", headers=bearer(key), json=body)


async def limits(client: httpx.AsyncClient, headers: dict[str, str] = ADMIN) -> dict[str, dict[str, Any]]:
    reply = await client.get("/api/v1/limits", headers=headers)
    assert reply.status_code == 200, reply.text
    return {f"{one['scope']} {one['name']}": one for one in reply.json()["limits"]}


async def test_the_limits_of_a_key_bind_it_and_the_keys_of_its_sessions(client: httpx.AsyncClient) -> None:
    key = await made(client, kind="run", run="a", name="ci", limits={"calls_per_minute": 2, "burst_seconds": 30})
    assert key["limits"] == {"calls_per_minute": 2, "burst_seconds": 30.0}
    session = (await client.post("/v1/sessions", headers=bearer(key["key"]), json={})).json()["api_key"]
    answered = await call(client, session)
    assert answered.headers["x-ratelimit-limit-requests"] == "2"
    refused = await call(client, key["key"])
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
    message = refused.json()["error"]["message"]
    assert "the key 'ci' accepts 2 calls a minute (key.limits.calls_per_minute)" in message
    path = f"/api/v1/keys/{key['id']}"
    changed = await client.patch(path, headers=ADMIN, json={"limits": None, "name": "ci-2", "expires_in": 60})
    assert (changed.json()["limits"], changed.json()["name"]) == (None, "ci-2")
    assert changed.json()["expires_at"] == pytest.approx(changed.json()["created_at"] + 60, abs=20)
    assert (await client.get(path, headers=ADMIN)).json() == changed.json()
    assert (await call(client, key["key"])).status_code == 200
    for body in ({}, {"name": "bootstrap"}, {"limits": {"calls_per_minute": 0}}, {"limits": {"calls": 1}}):
        assert (await client.patch(path, headers=ADMIN, json=body)).status_code == 400, body


async def test_a_project_shows_the_use_of_its_budget_and_refuses_calls_beyond_it(client: httpx.AsyncClient) -> None:
    key = (await made(client, kind="project", project="shop"))["key"]
    path = "/api/v1/projects/shop"
    changed = await client.patch(path, headers=ADMIN, json={"limits": {"tokens_per_day": 8}})
    assert changed.json()["limits"] == {"burst_seconds": 10.0, "tokens_per_day": 8}
    used = (await call(client, key, "a")).json()["usage"]["total_tokens"]
    assert used > 8
    refused = await call(client, key, "a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert "the project 'shop' has used its budget of 8 tokens a day" in refused.json()["error"]["message"]
    (budget,) = (await limits(client))["project shop"]["budgets"]
    assert (budget["period"], budget["tokens"], budget["left"], budget["is_exhausted"]) == ("day", 8, 0, True)
    assert budget["used"] == used
    kinds = [one["kind"] for one in (await client.get("/api/v1/events", headers=ADMIN)).json()["events"]]
    assert kinds.count("budget.exhausted") == 1
    assert (await client.patch(path, headers=ADMIN, json={"limits": {}})).json()["limits"] is None
    assert (await client.patch(path, headers=ADMIN, json={})).status_code == 400


async def test_each_key_sees_the_limits_in_its_scope(client: httpx.AsyncClient) -> None:
    await client.patch("/api/v1/projects/shop", headers=ADMIN, json={"limits": {"calls_per_minute": 600}})
    own = await made(client, kind="run", run="b", name="own", limits={"calls_per_minute": 5})
    await made(client, kind="run", run="other", name="theirs", limits={"calls_per_minute": 5})
    rotated = (
        await client.post(f"/api/v1/keys/{own['id']}/rotate", headers=ADMIN, json={"grace_seconds": 60})
    ).json()
    project = await made(client, kind="project", project="shop")
    viewer = await made(client, kind="viewer", project="shop")
    everything = {"project shop", "run a", "run other", "key own", "key theirs"}
    assert set(await limits(client)) == everything
    assert set(await limits(client, bearer(project["key"]))) == {"project shop", "run a", "key own"}
    assert set(await limits(client, bearer(viewer["key"]))) == {"project shop", "run a"}
    assert set(await limits(client, bearer(rotated["key"]))) == {"key own"}
    await client.delete(f"/api/v1/keys/{rotated['id']}", headers=ADMIN)
    await client.delete(f"/api/v1/keys/{own['id']}", headers=ADMIN)
    assert set(await limits(client)) == everything - {"key own"}


async def test_limits_that_would_bind_nothing_are_refused(client: httpx.AsyncClient) -> None:
    body = {"kind": "trainer", "run": "a", "limits": {"calls_per_minute": 5}}
    refused = await client.post("/api/v1/keys", headers=ADMIN, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limits")
    assert "give them to a run key or a project key" in refused.json()["error"]["message"]
    own = (await client.get("/api/v1/keys/self", headers=ADMIN)).json()["id"]
    configured = await client.patch(f"/api/v1/keys/{own}", headers=ADMIN, json={"name": "mine"})
    assert (configured.status_code, "[bootstrap]" in configured.json()["error"]["message"]) == (409, True)


async def test_a_project_key_limits_its_run_keys_and_not_itself(client: httpx.AsyncClient) -> None:
    project = await made(client, kind="project", project="shop", limits={"tokens_per_day": 1000})
    theirs = await made(client, kind="run", run="other")
    own = await made(client, kind="run", run="a")
    limited = {"limits": {"tokens_per_day": 10}}
    for key_id, status in ((own["id"], 200), (project["id"], 403), (theirs["id"], 404)):
        reply = await client.patch(f"/api/v1/keys/{key_id}", headers=bearer(project["key"]), json=limited)
        assert reply.status_code == status, reply.text
    forbidden = await client.patch("/api/v1/projects/shop", headers=bearer(project["key"]), json={"limits": None})
    assert forbidden.status_code == 403
