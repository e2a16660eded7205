"""Webhooks over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proxy.auth.service import PrincipalKind
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.projects.service import ProjectDirectory
from proxy.runs.deletion import RunDeletion
from proxy.webhooks import endpoints
from tests.fakes.run_history import NOW, add_run
from tests.proxy.overview.site import Site, open_site
from tests.proxy.webhooks.world import Webhooks, open_webhooks
from tests.running_app import bearer

PATH = "/api/v1/webhooks"
PUBLIC = "https://hooks.example.org/base-rl"


class Api:
    """The endpoints with one key."""

    def __init__(self, site: Site, headers: dict[str, str]) -> None:
        self._site = site
        self._headers = headers

    async def ask(self, method: str, path: str = "", status: int = 200, json: Any = None, **query: Any) -> Any:
        reply = await self._site.client.request(method, PATH + path, json=json, params=query, headers=self._headers)
        assert reply.status_code == status, reply.text
        return reply.json() if reply.content else None

    async def refusal(self, status: int, method: str, path: str = "", json: Any = None) -> str:
        """Return the parameter that the error names, and its message."""
        error = (await self.ask(method, path, status, json))["error"]
        return f"{error['param']}: {error['message']}"


@pytest.fixture
async def site(database_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(database_url, tmp_path, clock=lambda: NOW) as opened:
        add_routes(opened.app, endpoints.router)
        yield opened


@pytest.fixture
async def webhooks(site: Site) -> AsyncIterator[Webhooks]:
    async with open_webhooks(site.database) as opened:
        provide(site.app, opened.service)
        yield opened


@pytest.fixture
async def admin(site: Site, webhooks: Webhooks) -> Api:
    return Api(site, await site.key(PrincipalKind.ADMIN))


async def test_a_webhook_is_created_shown_changed_and_deleted(admin: Api, site: Site) -> None:
    run_id = await add_run(site.database)
    body = {"url": PUBLIC, "events": ["version", "run.paused"], "run": "calculator", "label": "chat"}
    made = await admin.ask("POST", status=201, json=body)
    secret = made.pop("secret")
    assert secret.startswith("whsec_")
    assert (made["url"], made["events"], made["label"], made["run_id"]) == (PUBLIC, body["events"], "chat", run_id)
    assert await admin.ask("GET", f"/{made['id']}") == made
    assert await admin.ask("GET") == {"webhooks": [made]}
    assert secret not in str(await admin.ask("GET"))
    changed = await admin.ask("PATCH", f"/{made['id']}", json={"events": ["*"], "enabled": False})
    assert (changed["events"], changed["enabled"], changed["disabled_because"]) == (["*"], False, "on request")
    assert (await admin.ask("PATCH", f"/{made['id']}", json={"enabled": True}))["enabled"]
    rotated = await admin.ask("POST", f"/{made['id']}/rotate", 201, {"grace_seconds": 60})
    assert rotated["secret"] != secret
    assert rotated["previous_secret_until"] is not None
    assert (await admin.ask("POST", f"/{made['id']}/rotate", 201))["secret"] != rotated["secret"]
    await admin.ask("DELETE", f"/{made['id']}", 204)
    assert "there is no webhook" in await admin.refusal(404, "GET", f"/{made['id']}")


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({"url": "http://169.254.169.254/latest/meta-data"}, "url: "),
        ({"url": "https://localhost/"}, "url: "),
        ({"url": "https://[::1]/"}, "url: "),
        ({"url": "http://hooks.example.org@10.0.0.1/"}, "url: "),
        ({"url": "hooks.example.org"}, "url: "),
        ({"url": 7}, "url: "),
        ({"url": "https://" + "a" * 5000}, "url: "),
        ({"events": []}, "events: "),
        ({"events": ["version.comitted"]}, "events: there is no event 'version.comitted'"),
        ({"events": "*"}, "events: "),
        ({"run": "nowhere"}, "there is no run"),
        ({"project": "nowhere"}, "there is no project"),
        ({"run": "nowhere", "project": "default"}, "give one of them"),
        ({"secret": "chosen"}, "there is no such field"),
    ],
)
async def test_a_wrong_webhook_is_refused_with_the_field(admin: Api, body: dict[str, Any], wrong: str) -> None:
    status = 404 if "there is no run" in wrong or "there is no project" in wrong else 400
    given = {"url": PUBLIC, "events": ["*"], **body}
    assert wrong in await admin.refusal(status, "POST", json=given)
    made = await admin.ask("POST", status=201, json={"url": PUBLIC, "events": ["*"]})
    if {"url", "events"} & set(body):
        assert wrong in await admin.refusal(400, "PATCH", f"/{made['id']}", json=body)


async def test_an_event_of_a_newer_version_may_be_named_once_it_happened(admin: Api, webhooks: Webhooks) -> None:
    body = {"url": PUBLIC, "events": ["novelty"]}
    await admin.refusal(400, "POST", json=body)
    await webhooks.happen("novelty.seen")
    await admin.ask("POST", status=201, json=body)


async def test_deliveries_are_listed_in_pages_shown_and_delivered_again(admin: Api, webhooks: Webhooks) -> None:
    made = await admin.ask("POST", status=201, json={"url": webhooks.url, "events": ["*"]})
    at = f"/{made['id']}/deliveries"
    for number in range(3):
        webhooks.status = 410 if number == 2 else 200
        await webhooks.happen("run.paused", number=number)
        await webhooks.deliver()
    first = await admin.ask("GET", at, limit=2)
    second = await admin.ask("GET", at, limit=2, cursor=first["next_cursor"])
    assert [one["state"] for one in first["deliveries"] + second["deliveries"]] == ["dead", "done", "done"]
    assert second["next_cursor"] is None
    dead = first["deliveries"][0]
    assert (await admin.ask("GET", at, state="dead"))["deliveries"] == [dead]
    assert await admin.ask("GET", f"{at}/{dead['id']}") == dead
    webhooks.status = 200
    await admin.ask("PATCH", f"/{made['id']}", json={"enabled": True})
    again = await admin.ask("POST", f"{at}/{dead['id']}/redeliver", 202)
    assert (again["id"], again["state"], again["event"]) == (dead["id"], "waiting", dead["event"])
    assert "under way" in await admin.refusal(409, "POST", f"{at}/{dead['id']}/redeliver")
    done = first["deliveries"][1]
    repeated = await admin.ask("POST", f"{at}/{done['id']}/redeliver", 202)
    assert repeated["id"] != done["id"]
    await webhooks.deliver()
    ids = [request.headers["webhook-id"] for request in webhooks.received]
    assert sorted(ids[-2:]) == sorted([dead["event"], done["event"]])
    assert "has no delivery" in await admin.refusal(404, "GET", f"{at}/job_x")
    assert "has no delivery" in await admin.refusal(404, "POST", f"{at}/job_x/redeliver")


async def test_a_test_message_is_a_delivery(admin: Api, webhooks: Webhooks) -> None:
    made = await admin.ask("POST", status=201, json={"url": webhooks.url, "events": ["version"]})
    sent = await admin.ask("POST", f"/{made['id']}/test", 202)
    assert (sent["type"], sent["state"]) == ("webhook.test", "waiting")
    await webhooks.deliver()
    shown = await admin.ask("GET", f"/{made['id']}/deliveries/{sent['id']}")
    assert (shown["state"], shown["status"]) == ("done", 200)


async def test_the_key_of_a_project_manages_the_webhooks_of_the_project_and_its_runs(
    admin: Api, site: Site, webhooks: Webhooks
) -> None:
    project = await ProjectDirectory(site.database, site.signals, webhooks.clock).create("theirs")
    await add_run(site.database)
    key = await site.credentials.create(PrincipalKind.PROJECT, project_id=project.id)
    theirs = Api(site, bearer(key.text))
    other = await admin.ask("POST", status=201, json={"url": PUBLIC, "events": ["*"]})
    own = await theirs.ask("POST", status=201, json={"url": PUBLIC, "events": ["*"]})
    assert own["project_id"] == project.id
    assert [one["id"] for one in (await theirs.ask("GET"))["webhooks"]] == [own["id"]]
    assert len((await admin.ask("GET"))["webhooks"]) == 2
    for method, rest in (
        ("GET", ""),
        ("PATCH", ""),
        ("DELETE", ""),
        ("POST", "/rotate"),
        ("POST", "/test"),
        ("GET", "/deliveries"),
        ("GET", "/deliveries/job_x"),
        ("POST", "/deliveries/job_x/redeliver"),
    ):
        body = {"enabled": False} if method == "PATCH" else None
        assert "there is no webhook" in await theirs.refusal(404, method, f"/{other['id']}{rest}", body)
    for scope in ({"run": "calculator"}, {"project": "default"}):
        await theirs.refusal(404, "POST", json={"url": PUBLIC, "events": ["*"], **scope})
    await theirs.ask("DELETE", f"/{own['id']}", 204)


@pytest.mark.parametrize("kind", [PrincipalKind.VIEWER, PrincipalKind.RUN, PrincipalKind.TRAINER])
async def test_other_keys_manage_no_webhooks(site: Site, webhooks: Webhooks, kind: PrincipalKind) -> None:
    run_id = await add_run(site.database)
    weak = Api(site, await site.key(kind, None if kind is PrincipalKind.VIEWER else run_id))
    await weak.refusal(403, "GET")
    await weak.refusal(403, "POST", json={"url": PUBLIC, "events": ["*"]})


async def test_a_deleted_project_takes_its_webhooks_with_it(admin: Api, site: Site, webhooks: Webhooks) -> None:
    projects = ProjectDirectory(site.database, site.signals, webhooks.clock)
    await projects.create("theirs")
    made = await admin.ask("POST", status=201, json={"url": PUBLIC, "events": ["*"], "project": "theirs"})
    await projects.delete("theirs")
    await admin.refusal(404, "GET", f"/{made['id']}")


async def test_a_deleted_run_takes_its_webhooks_with_it(
    admin: Api, site: Site, webhooks: Webhooks, tmp_path: Path
) -> None:
    await add_run(site.database)
    made = await admin.ask("POST", status=201, json={"url": PUBLIC, "events": ["*"], "run": "calculator"})
    deletion = RunDeletion(
        database=site.database, signals=site.signals, clock=webhooks.clock, weights_dir=tmp_path / "weights"
    )
    assert await deletion.delete("calculator", confirm=None, is_served=False)
    await deletion.aclose()
    await admin.refusal(404, "GET", f"/{made['id']}")
