"""The pages of keys and projects, for an administrator and for the people of one project."""

from __future__ import annotations

from tests.proxy.admin.pages.browsing import Browser, secret_in
from tests.running_app import bearer


async def test_a_key_from_its_creation_to_its_revocation(browser: Browser) -> None:
    form = {"kind": "run", "run": "mine", "name": "ci", "expires_in": "86400", "tokens_per_day": "20,000"}
    made = await browser.send("/admin/new-key", 200, **form)
    assert made.headers["cache-control"] == "no-store"
    text = secret_in(made.text)
    view = await browser.ask("GET", "/api/v1/keys/self", text)
    assert (view["name"], view["limits"]["tokens_per_day"]) == ("ci", 20000)
    listed = await browser.page("/admin/keys")
    for words in ("ci", "expires in", "of 20k tokens/day"):
        assert words in listed, words
    assert text not in listed
    path = f"/admin/keys/{view['id']}"
    await browser.send(path, name="ci-2", expires_in="", calls_per_minute="60", tokens_per_day="")
    changed = await browser.ask("GET", f"/api/v1/keys/{view['id']}")
    assert (changed["name"], changed["expires_at"], changed["limits"]["calls_per_minute"]) == ("ci-2", None, 60)
    successor = secret_in((await browser.send(f"{path}/rotate", 200, grace="3600")).text)
    for key in (text, successor):
        assert (await browser.ask("GET", "/api/v1/keys/self", key))["limited_as"] == view["id"]
    assert "replaced, ends in" in await browser.page(path)
    new = (await browser.ask("GET", "/api/v1/keys/self", successor))["id"]
    assert "This cannot be undone" in await browser.page(f"/admin/keys/{new}/revoke")
    await browser.send(f"/admin/keys/{new}/revoke")
    assert (await browser.client.get("/api/v1/keys/self", headers=bearer(successor))).status_code == 401


async def test_wrong_forms_are_shown_again_with_the_error(browser: Browser) -> None:
    for form, error in (
        ({"kind": "run"}, "needs a run"),
        ({"kind": "run", "run": "nowhere"}, "there is no run"),
        ({"kind": "run", "run": "mine", "calls_per_minute": "many"}, "Calls per minute is a whole number"),
        ({"kind": "trainer", "run": "mine", "calls_per_minute": "5"}, "limits bind model calls"),
        ({"kind": "run", "run": "mine", "name": "bootstrap"}, "is reserved"),
        ({"kind": "run", "run": "mine", "expires_in": "7"}, "choose one of the times"),
    ):
        assert error in (await browser.send("/admin/new-key", 400, **form)).text, form
    own = (await browser.ask("GET", "/api/v1/keys/self"))["id"]
    assert "last admin key" in (await browser.send(f"/admin/keys/{own}/revoke", 409)).text
    assert "[bootstrap]" in (await browser.send(f"/admin/keys/{own}", 409, name="other")).text
    hostile = await browser.send(
        "/admin/new-key", 200, kind="viewer", all_runs="true", name="<script>alert(1)</script>"
    )
    assert "<script>alert" not in hostile.text + await browser.page("/admin/keys")
    assert (await browser.client.post("/admin/new-key", data={"kind": "admin"})).status_code == 403, (
        "another site's form"
    )


async def test_a_project_from_its_creation_to_its_deletion(browser: Browser) -> None:
    await browser.send("/admin/projects", name="lab")
    assert "already: choose another name" in (await browser.send("/admin/projects", 409, name="lab")).text
    await browser.send("/admin/projects/lab/limits", calls_per_minute="6", tokens_per_month="1000")
    assert (await browser.ask("GET", "/api/v1/projects/lab"))["limits"]["tokens_per_month"] == 1000
    assert "whole number" in (await browser.send("/admin/projects/lab/limits", 400, tokens_per_day="-1")).text
    await browser.send("/admin/projects/lab/runs", run="mine")
    page = await browser.page("/admin/projects/lab")
    assert "/admin/runs/mine" in page
    assert "0 of 1k tokens/month" in page
    assert "lab · " in await browser.page("/admin"), "the overview of runs shows the project"
    assert "With all runs of lab" in await browser.page("/admin/runs/mine")
    assert "With all runs of lab" not in await browser.page("/admin/runs/theirs")
    assert "there is no run" in (await browser.send("/admin/projects/lab/runs", 400, run="nowhere")).text
    assert "archive them first" in (await browser.send("/admin/projects/lab/archive", 409)).text
    assert "type lab to confirm" in (await browser.send("/admin/projects/lab/delete", 400, confirmation="la")).text
    assert "has 1 runs" in (await browser.send("/admin/projects/lab/delete", 409, confirmation="lab")).text
    await browser.send("/admin/projects/shop/runs", run="mine")
    await browser.send("/admin/projects/lab/archive")
    await browser.send("/admin/projects/lab/unarchive")
    await browser.send("/admin/projects/lab/delete", confirmation="lab")
    await browser.page("/admin/projects/lab", 404)


async def test_a_run_is_created_in_a_project(browser: Browser) -> None:
    model = (await browser.ask("GET", "/api/v1/runs/mine"))["base_model"]
    refused = await browser.send("/admin/new-run", 400, name="new", model=model, project="nowhere")
    assert "there is no project" in refused.text
    await browser.send("/admin/new-run", name="new", model=model, project="shop")
    assert (await browser.ask("GET", "/api/v1/runs/new"))["project"] == "shop"


async def test_people_of_a_project_see_and_manage_what_is_theirs(browser: Browser) -> None:
    project = await browser.ask("POST", "/api/v1/keys", kind="project", project="shop", name="ada")
    theirs = await browser.ask("POST", "/api/v1/keys", kind="run", run="theirs", name="their-key")
    await browser.enter(project["key"])
    everything = [await browser.page(path) for path in ("/admin", "/admin/projects", "/admin/keys", "/admin/events")]
    everything.append(await browser.page("/admin/projects/shop"))
    assert "/admin/runs/mine" in everything[0]
    for words in ("theirs", "elsewhere", "their-key"):
        assert not any(words in page for page in everything), words
    for path in ("/admin/runs/theirs", "/admin/projects/elsewhere", f"/admin/keys/{theirs['id']}"):
        await browser.page(path, 404)
    for path in ("/admin/engines", f"/admin/keys/{project['id']}", "/admin/projects/shop/delete"):
        await browser.page(path, 403)
    made = secret_in((await browser.send("/admin/new-key", 200, kind="run", run="mine", name="agents")).text)
    assert (await browser.ask("GET", "/api/v1/keys/self", made))["kind"] == "run"
    await browser.send("/admin/new-key", 400, kind="run", run="theirs")
    await browser.send("/admin/new-key", 403, kind="project", project="shop")
    await browser.send("/admin/projects/shop/limits", 403, calls_per_minute="")


async def test_a_viewer_reads_and_changes_nothing(browser: Browser) -> None:
    viewer = await browser.ask("POST", "/api/v1/keys", kind="viewer", project="shop")
    await browser.enter(viewer["key"])
    assert "/admin/runs/mine" in await browser.page("/admin")
    page = await browser.page("/admin/projects/shop")
    assert "Save limits" not in page
    assert "Members" not in page
    await browser.page("/admin/runs/mine")
    await browser.page("/admin/keys", 403)
    await browser.page("/admin/runs/theirs", 404)
    await browser.send("/admin/new-key", 403, kind="run", run="mine")
    await browser.send("/admin/runs/mine/pause", 403)
