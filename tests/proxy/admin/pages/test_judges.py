"""The page of a run's judges, on a whole proxy whose judge is a function."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from tests.proxy.admin.pages.browsing import Browser
from tests.running_app import bearer, until_ready

PAGE = "/admin/runs/mine/judges"
JUDGES = "tests.proxy.judges.judges_in_python"


async def sessions_of_people(browser: Browser, count: int) -> None:
    """Make ended sessions, each with a reward by a reviewer that is its number's tenth."""
    key = (await browser.ask("POST", "/api/v1/keys", kind="run", run="mine"))["key"]
    await until_ready(browser.client)
    for number in range(count):
        body = {"model": "mine", "messages": [{"role": "user", "content": str(number)}]}
        call = await browser.client.post("/v1/chat/completions", json=body, headers=bearer(key))
        session = call.headers["x-base-rl-session"]
        await browser.ask("POST", "/v1/feedback", key, session_id=session, reward=number / 10, source="reviewer:ada")
        await browser.ask("POST", f"/v1/sessions/{session}/end", key, outcome="completed")


async def judged(browser: Browser, count: int) -> dict[str, Any]:
    """Wait until the judge has made so many attempts, and return it as the API shows it."""
    while True:
        (judge,) = (await browser.ask("GET", "/api/v1/runs/mine/judges"))["judges"]
        if judge["scored"] + judge["failed"] >= count:
            return dict(judge)
        await asyncio.sleep(0.01)


def words(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


async def test_a_changed_judge_scores_the_others_and_is_compared_with_people(browser: Browser) -> None:
    assert "Scored 0 Failed 0" in words(await browser.page(PAGE))
    await sessions_of_people(browser, 6)
    await judged(browser, 6)
    shown = words(await browser.page(PAGE))
    assert "Scored 6 Failed 0" in shown
    assert "correlation unknown: one side is constant" in shown, "the function says the same of all"
    assert "There is nothing to judge" in await browser.page(f"{PAGE}/taste/rejudge")

    judge = {"kind": "python", "function": f"{JUDGES}:by_number"}
    await browser.ask("PATCH", "/api/v1/runs/mine", settings={"judges": {"taste": judge}})
    assert "too few to compare" in await browser.page(PAGE), "no score is of the new form"
    question = words(await browser.page(f"{PAGE}/taste/rejudge"))
    assert "6 ended sessions have no score" in question
    assert "This cannot be undone" in question
    reply = await browser.send(f"{PAGE}/taste/rejudge")
    assert reply.headers["location"] == f"{PAGE}?enqueued=6"
    assert "6 sessions will be judged" in await browser.page(reply.headers["location"])
    assert (await browser.send(f"{PAGE}/taste/rejudge")).headers["location"] == f"{PAGE}?enqueued=0"
    await judged(browser, 12)
    page = await browser.page(PAGE)
    assert "Agreement with reviewer:ada" in page, "a reviewer is compared with if nobody is named"
    assert "pairs 6 correlation 1.00 kappa" in words(page)
    agreement = await browser.ask("GET", "/api/v1/runs/mine/judges/taste/agreement?source=reviewer:ada")
    assert page.count("</title></circle>") == len(agreement["calibration"]) == 3
    nobody = words(await browser.page(f"{PAGE}?source=nobody"))
    assert "0 sessions or turns have both a score and such a reward" in nobody


async def test_a_problem_is_shown_and_a_source_cannot_mark_up_the_page(browser: Browser) -> None:
    judge = {"kind": "python", "function": f"{JUDGES}:failing"}
    await browser.ask("PATCH", "/api/v1/runs/mine", settings={"judges": {"taste": judge}})
    await sessions_of_people(browser, 1)
    assert (await judged(browser, 1))["failed"] == 1
    page = await browser.page(f"{PAGE}?source=<script>alert(1)</script>")
    assert f"The newest attempt failed: the function {JUDGES}:failing raised ValueError" in words(page)
    assert "&lt;script&gt;alert" in page
    assert "<script>alert" not in page
    assert "No judges" in await browser.page("/admin/runs/theirs/judges")


async def test_who_reads_judges_and_who_lets_them_judge(browser: Browser) -> None:
    form = f"{PAGE}/taste/rejudge"
    await browser.page("/admin/runs/nowhere/judges", 404)
    await browser.page(f"{PAGE}/other/rejudge", 404)
    await browser.send(f"{PAGE}/other/rejudge", 404)
    assert (await browser.client.post(form)).status_code == 403, "another site's form"
    scopes: tuple[dict[str, str], ...] = (
        {"kind": "viewer", "project": "shop"}, {"kind": "run", "run": "mine"}, {"kind": "project", "project": "shop"},
    )  # fmt: skip
    for scope in scopes:
        await browser.enter((await browser.ask("POST", "/api/v1/keys", **scope))["key"])
        changes = scope["kind"] == "project"
        assert ("Score the others too" in await browser.page(PAGE)) is changes
        await browser.page(form, 200 if changes else 403)
        await browser.send(form, 303 if changes else 403)
        await browser.page("/admin/runs/theirs/judges", 404)
