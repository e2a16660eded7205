"""The page in a real browser, on a real server and database."""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from proxy.auth.service import PrincipalKind
from tests.database import sqlite_database
from tests.fakes.run_history import add_history, add_run, add_session
from tests.proxy.overview.serving import serving
from tests.proxy.overview.site import Site, open_site

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not CHROMIUM.exists() and os.environ.get("BASE_RL_REQUIRE_BROWSER") != "1",
        reason=f"there is no {CHROMIUM}; install Debian's chromium, or set BASE_RL_REQUIRE_BROWSER=1 to fail instead",
    ),
]


@pytest.fixture
async def live_site(tmp_path: Path) -> AsyncIterator[tuple[Site, str]]:
    """A site with the present time, and its address."""
    async with open_site(sqlite_database(tmp_path), tmp_path, clock=time.time) as site, serving(site) as address:
        yield site, address


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        await launched.close()


class Watched:
    """Violations by a page: messages on the console, or requests beyond this machine."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.hosts: set[str | None] = set()
        page.on("console", lambda message: self._heard(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname))

    def _heard(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"}:
            self.complaints.append(text)


async def _sign_in(page: Page, site: Site, address: str) -> None:
    key = await site.credentials.create(PrincipalKind.ADMIN)
    await page.goto(f"{address}/admin")
    await page.get_by_label("Key").fill(key.text)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("heading", name="Runs")).to_be_visible()


async def test_a_run_is_watched_live_and_a_session_is_read(live_site: tuple[Site, str], browser: Browser) -> None:
    site, address = live_site
    now = time.time()
    run_id = await add_run(site.database, now=now - 120)
    await add_history(site.database, run_id, steps=6, per_step=16, now=now)
    page = await browser.new_page()
    watched = Watched(page)
    await _sign_in(page, site, address)

    await page.get_by_role("link", name="calculator", exact=True).click()
    await expect(page.get_by_text("live", exact=True)).to_be_visible()
    chart = page.locator("#chart-reward")
    await expect(chart).to_have_attribute("data-points", "100")
    assert await _painted_pixels(page) > 200
    before = await page.locator("#mean-reward").inner_text()

    fresh = await add_session(site.database, run_id, now=time.time(), reward=-40.0)
    site.signals.events.notify()
    await expect(page.locator("#mean-reward")).not_to_have_text(before)
    await expect(chart).to_have_attribute("data-points", "101")
    await expect(page.locator(f"#link-{fresh}")).to_be_visible()

    await page.locator("select[name=training]").select_option("consumed")
    await expect(page.locator("#sessions tbody tr").first).to_contain_text("consumed")
    await expect(page.locator(f"#link-{fresh}")).to_have_count(0)
    await page.get_by_role("link", name="Older").click()
    await expect(page.get_by_role("link", name="Newest")).to_be_visible()

    await page.locator("#sessions tbody a.mono").first.click()
    await expect(page.locator(".call-name").first).to_have_text("add")
    await expect(page.locator(".call pre").first).to_have_text('{"a": 17, "b": 25}')
    await expect(page.locator(".role-tool").first).to_contain_text("42")
    await expect(page.locator(".ledger .reward")).to_have_text(re.compile("^[01]$"))
    await expect(page.locator("aside")).to_contain_text("learnt from it")
    await page.get_by_role("switch", name="Tokens").click()
    await expect(page.locator(".tokens").first).to_contain_text("<tool_call>")

    assert watched.complaints == []
    assert watched.hosts == {"127.0.0.1"}


@pytest.mark.parametrize("own_page", [False, True])
async def test_filters_live_in_the_address_and_back_leads_through_them(
    live_site: tuple[Site, str], browser: Browser, own_page: bool
) -> None:
    site, address = live_site
    run_id = await add_run(site.database, now=time.time() - 120)
    await add_history(site.database, run_id, steps=6, per_step=16, now=time.time())
    page = await browser.new_page()
    watched = Watched(page)
    await _sign_in(page, site, address)
    start = f"{address}/admin/runs/calculator{'/sessions' if own_page else ''}"
    await page.goto(start)
    training, first_row = page.locator("select[name=training]"), page.locator("#sessions tbody tr").first

    await training.select_option("consumed")
    await expect(page).to_have_url(f"{start}?training=consumed")
    await page.locator("input[name=min_reward]").fill("0.5")
    await page.locator("input[name=min_reward]").press("Enter")
    await expect(page).to_have_url(f"{start}?training=consumed&min_reward=0.5")
    await page.get_by_role("link", name="Older").click()
    await expect(page).to_have_url(re.compile("cursor="))
    linked = page.url

    for wanted, rewarded in (
        (f"{start}?training=consumed&min_reward=0.5", "0.5"),
        (f"{start}?training=consumed", ""),
    ):
        await page.go_back()
        await expect(page).to_have_url(wanted)
        await expect(training).to_have_value("consumed")
        await expect(page.locator("input[name=min_reward]")).to_have_value(rewarded)
        await expect(first_row).to_contain_text("consumed")
    await page.go_back()
    await expect(page).to_have_url(start)
    await expect(training).to_have_value("")

    await page.goto(linked)
    await expect(page.locator("input[name=min_reward]")).to_have_value("0.5")
    await expect(page.get_by_role("link", name="Newest")).to_be_visible()
    # htmx reports a refresh of the live page that was aborted by leaving the page.
    assert [complaint for complaint in watched.complaints if not complaint.startswith("htmx:")] == []


async def test_pausing_and_an_empty_run_that_fills(live_site: tuple[Site, str], browser: Browser) -> None:
    site, address = live_site
    run_id = await add_run(site.database, now=time.time())
    page = await browser.new_page(color_scheme="dark")
    watched = Watched(page)
    await _sign_in(page, site, address)
    await page.goto(f"{address}/admin/runs/calculator")
    await expect(page.get_by_role("heading", name="Point an agent here")).to_be_visible()
    await expect(page.locator("#chart-reward")).to_be_hidden()
    await expect(page.get_by_text("live", exact=True)).to_be_visible()
    await add_session(site.database, run_id, now=time.time(), reward=1.0)
    site.signals.events.notify()
    await expect(page.get_by_role("heading", name="Point an agent here")).to_have_count(0)
    await expect(page.locator("#chart-reward canvas")).to_be_visible()

    await page.get_by_role("button", name="Pause training").click()
    await expect(page.get_by_role("button", name="Resume training")).to_be_visible()
    assert (await site.overview.run(run_id)).state == "paused"
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_label("Key")).to_be_visible()
    assert watched.complaints == []
    assert watched.hosts == {"127.0.0.1"}


async def test_content_of_agents_runs_nothing(live_site: tuple[Site, str], browser: Browser) -> None:
    site, address = live_site
    run_id = await add_run(site.database, now=time.time())
    task = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    session_id = await add_session(site.database, run_id, now=time.time(), reward=1.0, task=task)
    page = await browser.new_page()
    watched = Watched(page)
    await _sign_in(page, site, address)
    for path in ("runs/calculator", f"sessions/{session_id}"):
        await page.goto(f"{address}/admin/{path}")
        await expect(page.get_by_text("<img src=x").first).to_be_visible()
        assert await page.title() != "taken"
    assert watched.complaints == []


async def _painted_pixels(page: Page) -> int:
    """Return how many pixels of the reward chart's canvas are not fully transparent."""
    count = await page.evaluate(
        """() => {
            const canvas = document.querySelector("#chart-reward canvas");
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let painted = 0;
            for (let index = 3; index < pixels.length; index += 4) painted += pixels[index] > 0;
            return painted;
        }"""
    )
    assert isinstance(count, int)
    return count
