"""Rating sessions in a real browser, with the keyboard alone."""

from __future__ import annotations

import os
import time

import pytest
from playwright.async_api import Browser, expect
from sqlalchemy import select

from proxy.auth.service import PrincipalKind
from proxy.database.tables import FeedbackTextRow, PreferenceRow, RewardRow
from tests.fakes.run_history import add_run, add_session
from tests.proxy.admin.test_browser import CHROMIUM, Watched, browser, live_site
from tests.proxy.overview.site import Site

__all__ = ["browser", "live_site"]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not CHROMIUM.exists() and os.environ.get("BASE_RL_REQUIRE_BROWSER") != "1",
        reason=f"there is no {CHROMIUM}; install Debian's chromium, or set BASE_RL_REQUIRE_BROWSER=1 to fail instead",
    ),
]


async def test_sessions_are_rated_without_a_mouse(live_site: tuple[Site, str], browser: Browser) -> None:
    site, address = live_site
    now = time.time()
    run_id = await add_run(site.database, now=now - 120)
    ids = [
        await add_session(site.database, run_id, now=now - number, reward=-1.0, task="17 + 25") for number in range(4)
    ]
    key = await site.credentials.create(PrincipalKind.REVIEWER, run_id=run_id, label="Ann")
    page = await browser.new_page()
    watched = Watched(page)
    await page.goto(f"{address}/admin")
    await page.keyboard.type(key.text)
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("1 of 4 in the queue")).to_be_visible()

    await page.keyboard.press("j")
    await expect(page.get_by_text("2 of 4 in the queue")).to_be_visible()
    await page.keyboard.press("k")
    await expect(page.get_by_text("1 of 4 in the queue")).to_be_visible()
    await page.keyboard.press("t")
    await page.keyboard.type("Use the calculator, u and d.")
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_role("status")).to_have_text("Recorded: a text.")
    await page.keyboard.press("d")
    await expect(page.get_by_role("status")).to_have_text("Recorded: a thumb down.")
    await page.keyboard.press("n")
    await page.keyboard.type("0.25")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("status")).to_have_text("Recorded: a number.")
    await page.keyboard.press("p")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("b")
    await expect(page.get_by_role("status")).to_have_text("Recorded: a preference.")
    await page.keyboard.press("u")
    await expect(page.get_by_role("status")).to_have_text("Recorded: a thumb up.")

    texts, rewards, preferences = [
        await site.database.read(
            lambda connection, table=table: list(  # type: ignore[misc]
                connection.execute(
                    select(table.__table__).where(table.source == "reviewer:Ann").order_by(table.sequence)
                ).all()
            )
        )
        for table in (FeedbackTextRow, RewardRow, PreferenceRow)
    ]
    assert [(row.session_id, row.text) for row in texts] == [(ids[0], "Use the calculator, u and d.")]
    assert [row.value for row in rewards] == [-1.0, 0.25, 1.0]
    assert len({row.session_id for row in rewards}) == 3
    assert [row.chosen_session_id for row in preferences] == [rewards[-1].session_id]
    assert watched.complaints == []
    assert watched.hosts == {"127.0.0.1"}
