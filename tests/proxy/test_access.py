"""Every endpoint of the OpenAPI document, asked with every kind of key about its own project and about another."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from proxy.app import Application, create_app
from proxy.auth.access import KINDS, PrincipalKind, Right
from proxy.settings import BootstrapSettings, RunSettings, ServerSettings, Settings
from tests.fakes.engine import FakeEngine
from tests.proxy.tokens.models import write_model
from tests.running_app import bearer, running

ADMIN = "rl-admin-chosen"
HIDDEN = ("hidden-run", "hidden-project", "hidden-key")
SCOPED = ("project", "run", "session", "trainer", "trainer of project", "viewer of project", "reviewer")
RIGHTS = {
    "GET /api/v1/runs/{run}": Right.READ,
    "PATCH /api/v1/runs/{run}": Right.CHANGE,
    "DELETE /api/v1/runs/{run}": Right.CHANGE,
    "POST /api/v1/runs/{run}/clone": Right.CHANGE,
    "POST /api/v1/runs/{run}/pause": Right.PAUSE,
    "POST /api/v1/runs/{run}/resume": Right.CHANGE,
    "POST /api/v1/runs/{run}/archive": Right.CHANGE,
    "POST /api/v1/runs/{run}/unarchive": Right.CHANGE,
    "GET /api/v1/runs/{run}/sessions": Right.READ,
    "GET /api/v1/runs/{run}/rewards": Right.READ,
    "GET /api/v1/runs/{run}/rewards/revised": Right.READ,
    "GET /api/v1/runs/{run}/steps": Right.READ,
    "GET /api/v1/runs/{run}/curves": Right.READ,
    "GET /api/v1/runs/{run}/keys": Right.CHANGE,
    "POST /api/v1/runs/{run}/keys": Right.CHANGE,
    "DELETE /api/v1/runs/{run}/keys/{key_id}": Right.CHANGE,
    "GET /api/v1/runs/{run}/claims": Right.READ_TRAINING,
    "POST /api/v1/runs/{run}/claims": Right.TRAIN,
    "GET /api/v1/runs/{run}/head": Right.TRAIN,
    "GET /api/v1/runs/{run}/versions": Right.READ_TRAINING,
    "POST /api/v1/runs/{run}/versions": Right.TRAIN,
    "POST /api/v1/runs/{run}/versions/prune": Right.TRAIN,
    "POST /api/v1/runs/{run}/versions/take-back": Right.TRAIN,
    "POST /api/v1/runs/{run}/versions/{version}/saved": Right.TRAIN,
    "GET /api/v1/runs/{run}/export": Right.READ_TRAINING,
    "GET /api/v1/runs/{run}/export/preferences": Right.READ_TRAINING,
    "POST /api/v1/runs/{run}/import": Right.CHANGE,
    "POST /api/v1/projects": Right.ADMINISTRATE,
    "PATCH /api/v1/projects/{project}": Right.ADMINISTRATE,
    "DELETE /api/v1/projects/{project}": Right.ADMINISTRATE,
    "GET /api/v1/health": Right.WATCH,
    "POST /api/v1/erase": Right.ADMINISTRATE,
}


@dataclass
class Installation:
    """A proxy with two projects: `own`, whose keys ask, and `hidden`."""

    app: Application
    client: httpx.AsyncClient
    keys: dict[str, dict[str, str]]
    own: dict[str, str]
    hidden: dict[str, str]

    async def ask(self, key: str, endpoint: str, about: dict[str, str]) -> httpx.Response:
        method, path = endpoint.split(" ")
        path = re.sub(r"\{(\w+)(:path)?\}", lambda found: about.get(found[1], "0"), path)
        headers = {"content-type": "application/json", **self.keys[key]}
        return await self.client.request(method, path, headers=headers, content=None if method == "GET" else b"{}")

    @property
    def endpoints(self) -> list[str]:
        # The event stream does not end, and the metrics need no key.
        paths = self.app.openapi()["paths"]
        asked = [path for path in paths if not path.endswith(("{run}/events", "/metrics"))]
        return [f"{method.upper()} {path}" for path in asked for method in paths[path]]


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[Installation]:
    model = write_model(tmp_path / "model")
    run = RunSettings(name="mine", model=str(model), project="own")
    app = create_app(
        Settings(
            server=ServerSettings(data_dir=tmp_path / "data"),
            bootstrap=BootstrapSettings(admin_key=SecretStr(ADMIN)),
            run=run,
            runs={"hidden-run": RunSettings(name="hidden-run", model=str(model), project="hidden-project")},
        ),
        engine=FakeEngine(lambda _request: [5, 6, 2], model_path=str(model), label="default"),
    )
    async with running(app) as client:

        async def made(**body: Any) -> dict[str, Any]:
            reply = await client.post("/api/v1/keys", headers=bearer(ADMIN), json=body)
            assert reply.status_code == 201, reply.text
            found: dict[str, Any] = reply.json()
            return found

        texts = {
            "project": (await made(kind="project", project="own"))["key"],
            "run": (await made(kind="run", run="mine"))["key"],
            "trainer": (await made(kind="trainer", run="mine"))["key"],
            "trainer of project": (await made(kind="trainer", project="own"))["key"],
            "trainer of all": (await made(kind="trainer", all_runs=True))["key"],
            "viewer of project": (await made(kind="viewer", project="own"))["key"],
            "reviewer": (await made(kind="reviewer", project="own"))["key"],
            "viewer of all": (await made(kind="viewer", all_runs=True))["key"],
            "admin": ADMIN,
        }
        hidden_key = await made(kind="run", run="hidden-run", name="hidden-key")
        sessions = {}
        for name, text in (("own", texts["run"]), ("hidden", hidden_key["key"])):
            sessions[name] = (await client.post("/v1/sessions", headers=bearer(text))).json()
        texts["session"] = sessions["own"]["api_key"]

        async def about(run_name: str, project: str, session: str) -> dict[str, str]:
            shown = (await client.get(f"/api/v1/runs/{run_name}", headers=bearer(ADMIN))).json()
            owner = (await client.get(f"/api/v1/projects/{project}", headers=bearer(ADMIN))).json()
            return {"run": shown["id"], "project": owner["id"], "session_id": session}

        hidden = await about("hidden-run", "hidden-project", sessions["hidden"]["id"])
        yield Installation(
            app=app,
            client=client,
            keys={name: bearer(text) for name, text in texts.items()},
            own=await about("mine", "own", sessions["own"]["id"]),
            hidden=hidden | {"key_id": hidden_key["id"]},
        )


async def test_nothing_of_another_project_is_reached_or_named(installation: Installation) -> None:
    about = installation.hidden
    for endpoint in installation.endpoints:
        for key in SCOPED:
            reply = await installation.ask(key, endpoint, about)
            assert reply.status_code < 500, (endpoint, key, reply.text)
            assert not any(name in reply.text for name in HIDDEN), (endpoint, key, reply.text)
            if any(f"{{{name}}}" in endpoint for name in ("run", "project", "session_id")):
                assert reply.status_code in (403, 404), (endpoint, key, reply.text)


async def test_a_right_decides_between_forbidden_and_unknown(installation: Installation) -> None:
    known = set(installation.endpoints)
    for endpoint, right in RIGHTS.items():
        assert endpoint in known, endpoint
        for key in SCOPED:
            kind = PrincipalKind(key.partition(" ")[0])
            allowed = kind in KINDS[right] and right not in (Right.WATCH, Right.ADMINISTRATE)
            reply = await installation.ask(key, endpoint, installation.hidden)
            assert reply.status_code == (404 if allowed else 403), (endpoint, key, reply.text)
            if not allowed or endpoint.startswith("GET "):
                own = await installation.ask(key, endpoint, installation.own)
                assert own.status_code == (200 if allowed else 403), (endpoint, key, own.text)


async def test_keys_for_everything_get_an_answer_everywhere(installation: Installation) -> None:
    for endpoint in installation.endpoints:
        for key in ("trainer of all", "viewer of all", "admin"):
            if key == "admin" and not endpoint.startswith("GET "):
                continue
            reply = await installation.ask(key, endpoint, installation.hidden)
            assert reply.status_code < 500, (endpoint, key, reply.text)
            if key == "viewer of all" and not endpoint.startswith("GET "):
                assert reply.status_code >= 400, (endpoint, reply.text)


async def test_a_project_key_works_in_the_runs_of_its_project(installation: Installation) -> None:
    client, key = installation.client, installation.keys["project"]
    body = {"model": "mine", "messages": [{"role": "user", "content": "Hello"}]}
    answer = await client.post("/v1/chat/completions", headers=key, json=body)
    assert answer.status_code == 200, answer.text
    session = answer.headers["x-base-rl-session"]
    for where, sent in (("/v1/chat/completions", body), ("/v1/messages", body | {"max_tokens": 5})):
        hidden = await client.post(where, headers=key, json={**sent, "model": "hidden-run"})
        nowhere = await client.post(where, headers=key, json={**sent, "model": "nowhere-at"})
        assert (hidden.status_code, nowhere.status_code) == (404, 404)
        messages = [reply.json()["error"]["message"] for reply in (hidden, nowhere)]
        assert messages[0].replace("hidden-run", "nowhere-at") == messages[1]
    nameless = await client.post("/v1/chat/completions", headers=key, json={"messages": body["messages"]})
    assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "model")
    assert (await client.post("/v1/feedback", headers=key, json={"reward": 1, "session_id": session})).is_success
    theirs = {"reward": 1, "session_id": installation.hidden["session_id"]}
    assert (await client.post("/v1/feedback", headers=key, json=theirs)).status_code == 404
    assert (await client.get(f"/v1/sessions/{session}", headers=key)).json()["rewards"]
    opened = await client.post("/v1/sessions", headers=key, json={"run": "mine"})
    assert opened.status_code == 201
    assert (await client.post("/v1/sessions", headers=key, json={"run": "hidden-run"})).status_code == 404
    assert (await client.post("/v1/sessions", headers=key, json={})).json()["error"]["param"] == "run"
    listed = (await client.get("/v1/models", headers=key)).json()["data"]
    assert {model["id"].partition("@")[0] for model in listed} >= {"mine"}
    assert not any("hidden" in model["id"] for model in listed)


async def test_a_key_sees_the_events_of_its_runs_alone(installation: Installation) -> None:
    seen = {}
    for key in ("viewer of project", "run", "admin"):
        reply = await installation.client.get("/api/v1/events", headers=installation.keys[key])
        seen[key] = {event["run_id"] for event in reply.json()["events"]}
    assert seen["viewer of project"] == seen["run"] == {installation.own["run"]}
    assert seen["admin"] >= {installation.own["run"], installation.hidden["run"], None}


async def test_a_run_moves_with_its_keys(installation: Installation) -> None:
    client, admin = installation.client, installation.keys["admin"]
    run = f"/api/v1/runs/{installation.hidden['run']}"
    assert (await client.patch(run, headers=installation.keys["project"], json={"project": "own"})).status_code == 404
    own = f"/api/v1/runs/{installation.own['run']}"
    forbidden = await client.patch(own, headers=installation.keys["project"], json={"project": "hidden-project"})
    assert forbidden.status_code == 403
    assert (await client.patch(run, headers=admin, json={"project": "nowhere"})).status_code == 404
    moved = await client.patch(run, headers=admin, json={"project": "own"})
    assert (moved.status_code, moved.json()["project"]) == (200, "own")
    assert (await client.get(run, headers=installation.keys["project"])).status_code == 200


async def test_projects_are_made_archived_and_deleted_when_empty(installation: Installation) -> None:
    client, admin, path = installation.client, installation.keys["admin"], "/api/v1/projects"
    made = await client.post(path, headers=admin, json={"name": "new"})
    assert (made.status_code, made.json()["runs"]) == (201, 0)
    assert (await client.post(path, headers=admin, json={"name": "new"})).status_code == 409
    for wrong in ({"name": "a b"}, {"name": "x", "limits": {}}, {}):
        assert (await client.post(path, headers=admin, json=wrong)).status_code == 400
    full = await client.delete(f"{path}/own", headers=admin)
    assert full.status_code == 409
    assert "has 1 runs, such as 'mine'" in full.json()["error"]["message"]
    assert (await client.patch(f"{path}/own", headers=admin, json={"archived": True})).status_code == 409
    assert (await client.patch(f"{path}/default", headers=admin, json={"archived": True})).status_code == 400
    assert (await client.delete(f"{path}/default", headers=admin)).status_code == 409
    archived = await client.patch(f"{path}/new", headers=admin, json={"archived": True})
    assert archived.json()["archived_at"] is not None
    moved = await client.patch(f"/api/v1/runs/{installation.own['run']}", headers=admin, json={"project": "new"})
    assert moved.status_code == 409
    assert (await client.delete(f"{path}/new", headers=admin)).status_code == 204
    names = [project["name"] for project in (await client.get(path, headers=admin)).json()["projects"]]
    assert sorted(names) == ["default", "hidden-project", "own"]
