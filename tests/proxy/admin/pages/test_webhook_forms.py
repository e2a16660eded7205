"""Webhooks that people create, change and delete on the page of a whole proxy."""

from __future__ import annotations

import asyncio
import html

from tests.proxy.admin.pages.browsing import Browser, secret_in
from tests.proxy.outbound.targets import target

URL = "https://hooks.example.org/base-rl"


async def test_a_webhook_from_its_creation_to_its_deletion(browser: Browser) -> None:
    async with target() as receiver:
        form = {"url": f"http://127.0.0.1:{receiver.port}/hook", "events": "version, run.paused", "run": "mine"}
        made = await browser.send("/admin/new-webhook", 200, **form, label="ops")
        secret = secret_in(made.text)
        assert made.headers["cache-control"] == "no-store"
        (view,) = (await browser.ask("GET", "/api/v1/webhooks"))["webhooks"]
        assert (view["events"], view["label"], view["enabled"]) == (["version", "run.paused"], "ops", True)
        listed, path = await browser.page("/admin/webhooks"), f"/admin/webhooks/{view['id']}"
        assert ("/admin/runs/mine" in listed, path in listed) == (True, True)
        await browser.send(f"{path}/test")
        while not receiver.requests:
            await asyncio.sleep(0.01)
        rotated = await browser.send(f"{path}/rotate", 200, grace="3600")
        assert secret != secret_in(rotated.text)
        assert rotated.headers["cache-control"] == "no-store"
        page = await browser.page(path)
        assert "The secret before this one signs too for" in page
        assert not any(text in page for text in (secret, secret_in(rotated.text)))
        assert "choose one of the times" in (await browser.send(f"{path}/rotate", 400, grace="7")).text
        await browser.send(f"{path}/disable")
        assert not (await browser.ask("GET", f"/api/v1/webhooks/{view['id']}"))["enabled"]
        assert "This cannot be undone" in await browser.page(f"{path}/delete")
        await browser.send(f"{path}/delete")
        assert (await browser.ask("GET", "/api/v1/webhooks"))["webhooks"] == []
        await browser.page(path, 404)


async def test_wrong_forms_are_shown_again_with_the_error(browser: Browser) -> None:
    for changed, field, error in (
        ({"url": ""}, "url", "URL"),
        ({"url": "ftp://x"}, "url", "http"),
        ({"url": "http://10.0.0.1/"}, "url", "10.0.0.1"),
        ({"events": " , "}, "events", "at least 1 item"),
        ({"events": "versoin"}, "events", "there is no event 'versoin'"),
        ({"run": "nowhere"}, "", "there is no run"),
        ({"run": "mine", "project": "shop"}, "project", "give one of them"),
        ({"project": "nowhere"}, "project", "there is no project"),
        ({"label": "x" * 201}, "label", "at most 200"),
    ):
        form = {"url": URL, "events": "run.paused"} | changed
        reply = html.unescape((await browser.send("/admin/new-webhook", 400, **form)).text)
        shown = reply.split(f'id="{field}-problem"')[1] if field else reply
        assert error in shown.split("</p>")[0] if field else error in shown, (changed, reply)
    hostile = await browser.send("/admin/new-webhook", 400, url=URL, events="odd", label="<script>x</script>")
    assert "<script>x" not in hostile.text
    assert (await browser.ask("GET", "/api/v1/webhooks"))["webhooks"] == []
    assert (await browser.client.post("/admin/new-webhook", data={"url": URL})).status_code == 403, "a foreign form"


async def test_people_of_a_project_manage_its_webhooks_alone(browser: Browser) -> None:
    theirs = await browser.ask("POST", "/api/v1/webhooks", url=URL, events=["*"], run="theirs", label="not-mine")
    path = f"/admin/webhooks/{theirs['id']}"
    viewer = await browser.ask("POST", "/api/v1/keys", kind="viewer", project="shop")
    project = await browser.ask("POST", "/api/v1/keys", kind="project", project="shop")
    await browser.enter(viewer["key"])
    for address in ("/admin/webhooks", "/admin/new-webhook", path):
        await browser.page(address, 403)
    await browser.send("/admin/new-webhook", 403, url=URL, events="*")
    await browser.enter(project["key"])
    assert "not-mine" not in await browser.page("/admin/webhooks")
    for address in (path, f"{path}/delete"):
        await browser.page(address, 404)
    for change in ("test", "enable", "disable", "rotate", "delete"):
        await browser.send(f"{path}/{change}", 404, grace="0")
    await browser.send("/admin/new-webhook", 400, url=URL, events="*", run="theirs")
    await browser.send("/admin/new-webhook", 400, url=URL, events="*", project="elsewhere")
    await browser.send("/admin/new-webhook", 200, url=URL, events="*")
    (own,) = (await browser.ask("GET", "/api/v1/webhooks", project["key"]))["webhooks"]
    assert own["project_id"] == project["project_id"], "a project's key makes webhooks of its project"
    await browser.page(f"/admin/webhooks/{own['id']}")
    await browser.send(f"/admin/webhooks/{own['id']}/delete")
