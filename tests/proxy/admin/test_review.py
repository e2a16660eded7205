"""Rating sessions on the page, with a reviewer's key."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select

from proxy.auth.service import PrincipalKind
from proxy.contract.states import SessionState
from proxy.database.tables import (
    FeedbackTextRow,
    JudgementRow,
    PreferenceRow,
    RewardRow,
    SessionRow,
)
from tests.fakes.run_history import add_run, add_session
from tests.proxy.admin.visiting import OWN, enter
from tests.proxy.overview.site import Site, open_site


@pytest.fixture
async def site(database_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(database_url, tmp_path, clock=time.time) as opened:
        yield opened


@pytest.fixture
async def run_id(site: Site) -> str:
    return await add_run(site.database, now=time.time())


async def rows(site: Site, table: Any) -> list[Any]:
    statement = select(table.__table__).where(table.source.startswith("reviewer:"))
    return await site.database.read(lambda connection: list(connection.execute(statement).all()))


async def page(site: Site, address: str = "/admin/review/calculator") -> str:
    reply = await site.client.get(address)
    assert reply.status_code == 200, reply.text
    return reply.text


async def rate(site: Site, session_id: str, **form: str) -> Any:
    text = await page(site, f"/admin/review/calculator?session={session_id}")
    (once,) = re.findall(r'name="once" value="([^"]+)"', text)
    address = f"/admin/review/calculator/{session_id}"
    return await site.client.post(address, data={"once": once, **form}, headers=OWN)


async def test_the_queue_says_why_and_ratings_take_sessions_out_of_it(site: Site, run_id: str) -> None:
    now = time.time()
    bad = await add_session(site.database, run_id, now=now - 2, reward=-1.0, task="a bad one")
    split = await add_session(site.database, run_id, now=now - 1, reward=0.5, task="judges differ")
    await add_session(site.database, run_id, now=now, reward=1.0, task="a good one")

    def judge(connection: Connection) -> None:
        judgement = {
            "run_id": run_id,
            "session_id": split,
            "judge": "helpful",
            "fingerprint": "f",
            "digest": "d",
            "reward_id": "rew_1",
            "score": 0.5,
            "votes": [0.0, 1.0],
            "spread": 1.0,
            "invalid_votes": 0,
            "is_cut": False,
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "created_at": now,
        }
        connection.execute(insert(JudgementRow).values(id="jdg_1", **judgement))

    await site.database.commit(judge)
    key = await site.credentials.create(PrincipalKind.REVIEWER, run_id=run_id, label="Ann")
    await site.client.post("/admin/login", data={"key": key.text}, headers=OWN)
    shown = await page(site)
    assert "votes of judge helpful differ by 1" in shown
    assert "1 of 2 in the queue" in shown
    assert "negative reward" in shown
    assert "a good one" not in shown

    reply = await rate(site, split, kind="bad")
    assert (reply.status_code, reply.headers["location"]) == (
        303,
        f"/admin/review/calculator?done=bad&session={bad}",
    )
    reply = await rate(site, bad, kind="number", reward="−0,5")
    assert reply.headers["location"] == "/admin/review/calculator?done=number"
    assert "Nothing to review" in await page(site)
    rewards = await rows(site, RewardRow)
    assert [(row.session_id, row.name, row.value, row.source) for row in rewards] == [
        (split, "review", -1.0, "reviewer:Ann"),
        (bad, "review", -0.5, "reviewer:Ann"),
    ]


async def test_texts_and_preferences_over_turns_and_sessions(site: Site, run_id: str) -> None:
    one = await add_session(site.database, run_id, now=time.time(), reward=1.0, task="the same")
    other = await add_session(site.database, run_id, now=time.time(), reward=0.0, task="the same")
    await enter(site, PrincipalKind.REVIEWER, run_id)
    shown = await page(site, f"/admin/review/calculator?session={one}")
    assert f'value="{other}"' in shown
    (turn,) = re.findall(r'<option value="(turn_[^"]+)"', shown)
    assert (await rate(site, one, kind="text", text="Use the calculator.", turn=turn)).status_code == 303
    assert (await rate(site, one, kind="worse", other=other)).status_code == 303
    ((text,), (preference,)) = (await rows(site, FeedbackTextRow)), (await rows(site, PreferenceRow))
    assert (text.turn_id, text.text) == (turn, "Use the calculator.")
    assert (preference.chosen_session_id, preference.rejected_session_id) == (other, one)


async def test_a_form_that_is_sent_twice_counts_once_and_an_open_session_stays_open(site: Site, run_id: str) -> None:
    session_id = await add_session(site.database, run_id, now=time.time())
    await enter(site, PrincipalKind.REVIEWER, run_id)
    form = {"once": "abc", "kind": "good"}
    for _ in range(2):
        reply = await site.client.post(f"/admin/review/calculator/{session_id}", data=form, headers=OWN)
        assert reply.status_code == 303
    assert len(await rows(site, RewardRow)) == 1
    statement = select(SessionRow.state).where(SessionRow.id == session_id)
    state = await site.database.read(lambda connection: connection.execute(statement).scalar_one())
    assert state == SessionState.OPEN.value


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"kind": "number", "reward": "much"}, "&#39;much&#39; is not a number"),
        ({"kind": "number", "reward": "nan"}, "is not a number"),
        ({"kind": "text", "text": "  "}, "this text is blank"),
        ({"kind": "text", "text": "x" * 16385}, "up to 16384 characters"),
        ({"kind": "better"}, "choose the session or the answer"),
        ({"kind": "shrug"}, "choose a rating"),
        ({}, "choose a rating"),
    ],
)
async def test_a_wrong_rating_shows_the_page_with_the_reason(
    site: Site, run_id: str, form: dict[str, str], message: str
) -> None:
    session_id = await add_session(site.database, run_id, now=time.time(), reward=1.0)
    await enter(site, PrincipalKind.REVIEWER, run_id)
    reply = await rate(site, session_id, **form)
    assert reply.status_code == 400
    assert message in reply.text
    assert "Rating" in reply.text
    assert await rows(site, RewardRow) == []


async def test_a_reviewer_sees_the_reviews_of_its_runs_and_nothing_else(site: Site, run_id: str) -> None:
    hidden = await add_run(site.database, now=time.time(), name="hidden")
    theirs = await add_session(site.database, hidden, now=time.time(), reward=1.0)
    await enter(site, PrincipalKind.REVIEWER, run_id)
    for address in (
        "/admin",
        "/admin/runs/calculator",
        "/admin/events",
        "/admin/engines",
        f"/admin/sessions/{theirs}",
    ):
        assert (await site.client.get(address)).status_code == 403, address
    for address in ("/admin/review/hidden", f"/admin/review/calculator?session={theirs}", "/admin/review/nowhere"):
        assert (await site.client.get(address)).status_code == 404, address
    posted = await site.client.post(
        f"/admin/review/calculator/{theirs}", data={"once": "a", "kind": "good"}, headers=OWN
    )
    assert posted.status_code == 404
    foreign = await site.client.post(f"/admin/review/calculator/{theirs}", data={"once": "a", "kind": "good"})
    assert foreign.status_code == 403, "another site's form"
    assert await rows(site, RewardRow) == []
