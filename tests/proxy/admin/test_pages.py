from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from sqlalchemy import Connection, insert, update

from proxy.auth.service import PrincipalKind
from proxy.database.tables import (
    EventRow,
    FeedbackTextRow,
    GroupRow,
    PreferenceRow,
    RewardRow,
    RunRow,
    SessionRow,
    TurnRow,
)
from proxy.lifecycle.lifecycle import settle
from proxy.overview.filters import SessionFilter
from proxy.sessions.identification import AttributedBy
from tests.fakes.run_history import NOW, add_run, add_session
from tests.proxy.admin.visiting import OWN, enter, pages
from tests.proxy.overview.site import ORIGIN, Site

HOSTILE = """<script>alert(1)</script>"'><img src=x onerror=alert(2)>{{7*7}}</pre></div>"""


async def test_every_page_answers_and_lets_only_our_own_files_run(site: Site, run_id: str) -> None:
    await enter(site)
    for path in [*await pages(site, run_id), "/admin/login", "/admin/nowhere"]:
        reply = await site.client.get(path)
        assert reply.status_code == (404 if path == "/admin/nowhere" else 200), path
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"


async def test_pausing_from_the_page(site: Site, run_id: str) -> None:
    await enter(site)
    reply = await site.client.post("/admin/runs/calculator/pause", headers=OWN)
    assert (reply.status_code, reply.headers["location"]) == (303, "/admin/runs/calculator")
    page = (await site.client.get("/admin/runs/calculator")).text
    assert "Resume training" in page
    await site.client.post("/admin/runs/calculator/resume", headers=OWN)
    assert (await site.overview.run(run_id)).state == "active"


async def test_a_run_key_sees_its_run_and_learns_of_no_other(site: Site, run_id: str) -> None:
    await add_run(site.database, name="secret-run")
    foreign = await add_session(site.database, (await site.overview.run("secret-run")).id, now=NOW)
    await enter(site, PrincipalKind.RUN, run_id)
    runs = (await site.client.get("/admin")).text
    assert "calculator" in runs
    assert "secret-run" not in runs
    run = await site.client.get("/admin/runs/calculator")
    assert "Pause training" not in run.text
    assert (await site.client.post("/admin/runs/calculator/pause", headers=OWN)).status_code == 403
    for path in ("runs/secret-run", "runs/secret-run/sessions", "runs/secret-run/curves", f"sessions/{foreign}"):
        assert (await site.client.get(f"/admin/{path}")).status_code == 404


class _Foreign(HTMLParser):
    """Collects what our templates never contain: scripts and pictures from elsewhere, handlers, styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    def in_page(cls, text: str) -> list[str]:
        parser = cls()
        parser.feed(text)
        parser.close()
        return parser.found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (
                name.startswith("on")
                or name == "style"
                or (name == "href" and (value or "").startswith("javascript"))
            ):
                self.found.append(f"{tag} {name}")
        source = dict(attrs).get("src") or ""
        if tag in {"script", "img", "iframe", "object"} and not source.startswith("/admin/static/"):
            self.found.append(tag)


def test_the_search_for_foreign_elements_finds_them() -> None:
    assert _Foreign.in_page(HOSTILE) == ["script", "img onerror", "img"]


async def test_hostile_content_stays_text_everywhere(site: Site, run_id: str) -> None:
    if site.database.url.get_backend_name() != "sqlite":
        pytest.skip("its columns hold no texts as long as these, which is the better protection")
    session = (await site.overview.sessions(run_id, SessionFilter(training="consumed"), limit=1)).sessions[0].id
    messages = [
        {"role": HOSTILE, "content": HOSTILE},
        {"role": "user", "content": [{"type": "text", "text": HOSTILE}]},
    ]
    made = {"id": HOSTILE, "call": {"index": 0, "name": HOSTILE, "arguments": HOSTILE}}
    answer = {"text": HOSTILE, "reasoning": HOSTILE, "tool_calls": [made]}
    changes: tuple[tuple[Any, dict[str, Any]], ...] = (
        (
            TurnRow,
            {
                "messages": messages,
                "response": {"choices": [answer]},
                "finish_reason": HOSTILE,
                "attributed_by": HOSTILE,
            },
        ),
        (
            SessionRow,
            {
                "task": HOSTILE,
                "metadata": {HOSTILE: HOSTILE},
                "attributed_by": HOSTILE,
                "external_id": None,
                "revised_at": NOW,
            },
        ),
        (RewardRow, {"name": HOSTILE, "source": HOSTILE, "comment": HOSTILE}),
        (GroupRow, {"size": 8}),
        (EventRow, {"kind": HOSTILE, "data": {"error": HOSTILE, "session_id": HOSTILE, "version": HOSTILE}}),
        (RunRow, {"base_model": HOSTILE}),
    )
    late = {"id": "rwd_late", "run_id": run_id, "session_id": session, "after_training": True, "created_at": NOW}
    preferred = {"id": "prf_1", "run_id": run_id, "chosen_session_id": session, "rejected_session_id": session}

    def work(connection: Connection) -> None:
        connection.execute(insert(RewardRow).values(late | {"name": "late", "value": -1.0, "source": "x"}))
        connection.execute(
            insert(PreferenceRow).values(preferred | {"source": HOSTILE, "comment": HOSTILE, "created_at": NOW})
        )
        connection.execute(insert(FeedbackTextRow).values(late | {"text": HOSTILE, "source": HOSTILE}))
        for table, values in changes:
            connection.execute(update(table.__table__).values(values))

    await site.database.commit(work)
    await enter(site)
    for path in [*await pages(site, run_id), f"/admin/sessions/{session}?tokens=1"]:
        text = (await site.client.get(path)).text
        assert _Foreign.in_page(text) == [], path
        assert "{{7*7}}" in text or "/steps/" in path, path
    assert "&lt;script&gt;alert(1)" in (await site.client.get(f"/admin/sessions/{session}")).text


async def test_a_revision_is_shown_wherever_the_session_is(site: Site, run_id: str) -> None:
    wanted = SessionFilter(training="consumed", min_reward=1.0)
    one, other = (await site.overview.sessions(run_id, wanted, limit=2)).sessions
    turn = (await site.overview.session(other.id)).turns[1].id
    late = {"run_id": run_id, "name": "reward", "source": "checker", "after_training": True, "created_at": NOW}
    preferred = {"id": "prf_1", "run_id": run_id, "chosen_session_id": one.id, "rejected_session_id": other.id}
    rows = (
        late | {"id": "rwd_1", "session_id": one.id, "value": 0.25, "comment": "the tests were wrong"},
        late | {"id": "rwd_2", "session_id": other.id, "value": -1.0, "turn_id": turn},
    )

    def work(connection: Connection) -> None:
        for row in rows:
            connection.execute(insert(RewardRow).values(row))
        settle(connection, [one.id, other.id], now=NOW)
        connection.execute(insert(PreferenceRow).values(preferred | {"source": "ada", "created_at": NOW}))

    await site.database.commit(work)
    await enter(site)

    async def text(path: str) -> str:
        return " ".join(re.sub(r"<[^>]*>", " ", (await site.client.get(path)).text).split())

    run = (await site.client.get("/admin/runs/calculator")).text
    assert "<b>2</b> trained sessions have had a reward changed" in run
    assert 'href="/admin/runs/calculator/revised"' in run
    assert (await text("/admin/runs/calculator/sessions?training=consumed&min_reward=0.2")).count("revised") == 2
    listed = await text("/admin/runs/calculator/revised")
    assert "0.25 reward by checker : the tests were wrong" in listed
    assert "a turn – → −1" in listed
    session = await site.client.get(f"/admin/sessions/{one.id}")
    assert session.text.count('<li class="superseded">') == 1
    shown = await text(f"/admin/sessions/{one.id}")
    assert "Trained on 1, now 0.25." in shown
    assert "chosen by ada over" in shown
    shown = await text(f"/admin/sessions/{other.id}")
    assert "The reward of a turn changed after the training." in shown
    assert "on turn 2 · after training" in shown
    assert "rejected by ada in favour of" in shown
    assert "2 of its trajectories had a reward changed" in await text(
        f"/admin/runs/calculator/steps/{one.consumed_by}"
    )


async def test_hostile_names_in_addresses_and_forms_are_shown_as_text(site: Site, run_id: str) -> None:
    await enter(site)
    reply = await site.client.get("/admin/runs/%3Cscript%3Ealert(1)%3C%2Fscript%3E")
    assert reply.status_code == 404
    assert "<script>alert" not in reply.text
    params = {"group": HOSTILE, "min_reward": HOSTILE, "state": HOSTILE}
    for name, value in params.items():
        page = await site.client.get("/admin/runs/calculator/sessions", params={name: value})
        assert page.status_code == (200 if name == "group" else 400)
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text


async def test_an_empty_run_teaches_how_to_begin(site: Site) -> None:
    await add_run(site.database, name="fresh")
    await enter(site)
    page = (await site.client.get("/admin/runs/fresh")).text
    assert f"OPENAI_BASE_URL={ORIGIN}/v1" in page
    assert "/v1/feedback" in page


async def test_how_calls_were_attributed_is_shown_and_explained(site: Site, run_id: str) -> None:
    await enter(site)
    session = await add_session(site.database, run_id, now=NOW, attributed_by="agent_header")
    ours = update(TurnRow).where(TurnRow.session_id == session)
    await site.database.commit(lambda connection: connection.execute(ours.values(attributed_by="prompt_cache_key")))
    page = (await site.client.get(f"/admin/sessions/{session}")).text
    for rule in (AttributedBy.AGENT_HEADER, AttributedBy.PROMPT_CACHE_KEY):
        label = rule.value.replace("_", " ")
        assert f'<span class="rule" title="{html.escape(rule.meaning)}">{label}</span>' in page.replace(
            "&#39;", "&#x27;"
        )


async def test_a_run_reports_calls_without_rewards_with_advice(site: Site, run_id: str) -> None:
    await enter(site)
    silent = await add_run(site.database, name="silent")
    await add_session(site.database, silent, now=NOW)
    await site.database.commit(
        lambda connection: connection.execute(
            update(TurnRow).where(TurnRow.run_id == silent).values(attributed_by="new")
        )
    )
    page = (await site.client.get("/admin/runs/silent")).text
    assert "unattributed</span>" in page
    assert "X-Base-RL-Session" in page
    assert "unattributed" not in (await site.client.get("/admin/runs/calculator")).text


async def test_the_sessions_table_is_an_htmx_fragment_with_pages(site: Site, run_id: str) -> None:
    await enter(site)
    fragment = await site.client.get("/admin/runs/calculator/sessions", headers={"hx-request": "true"})
    assert "<html" not in fragment.text
    shown: list[str] = []
    address: str | None = "/admin/runs/calculator/sessions?training=consumed"
    while address is not None:
        text = (await site.client.get(address)).text
        shown.extend(re.findall(r'id="link-(ses_\w+)"', text))
        older = re.search(r'href="([^"]+)"[^>]*>Older<', text)
        address = older.group(1).replace("&amp;", "&") if older else None
    assert len(shown) == len(set(shown)) == 96
    none = await site.client.get("/admin/runs/calculator/sessions?group=none")
    assert "No session matches" in none.text


async def test_errors_are_pages_that_say_what_to_do(site: Site, run_id: str) -> None:
    await enter(site)
    for path, status in (("runs/none", 404), ("sessions/none", 404), ("runs/calculator/steps/x", 400), ("a/b", 404)):
        reply = await site.client.get(f"/admin/{path}")
        assert reply.status_code == status
        assert reply.headers["content-type"].startswith("text/html")
        assert "All runs" in reply.text


SESSIONS = "/admin/runs/calculator/sessions"
HTMX = {"hx-request": "true"}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (f"{SESSIONS}?state=opened", "state"),
        (f"{SESSIONS}?training=trained", "consumed"),
        (f"{SESSIONS}?min_reward=much", "not a number"),
        (f"{SESSIONS}?max_reward=nan", "not a number"),
        (f"{SESSIONS}?cursor=x", "cursor"),
        (f"{SESSIONS}?stat=open", "stat"),
        ("/admin/runs/calculator?training=trained", "consumed"),
        ("/admin/runs/calculator/steps/6?by=luck", "by"),
        ("/admin?cursor=2", "cursor"),
    ],
)
async def test_addresses_that_mean_nothing_are_refused_by_name(site: Site, run_id: str, path: str, says: str) -> None:
    await enter(site)
    reply = await site.client.get(path)
    assert reply.status_code == 400
    assert says in reply.text
    assert "All runs" in reply.text
    fragment = await site.client.get(path, headers=HTMX)
    assert (fragment.status_code, fragment.headers["hx-redirect"]) == (400, path)


async def test_the_address_contains_the_filters_of_sessions(site: Site, run_id: str) -> None:
    """Empty fields of the form are not part of it; live updates of a page do not change it."""
    await enter(site)
    given = {"state": "", "training": "consumed", "group": "", "min_reward": "−0,5", "max_reward": ""}
    own, runs = SESSIONS, "/admin/runs/calculator"
    for page in (own, runs):
        here = HTMX | {"hx-current-url": f"http://proxy.test{page}?state=open"}
        changed = await site.client.get(own, params=given, headers=here | {"hx-trigger": "filters"})
        address = changed.headers["hx-push-url"]
        assert address == f"{page}?training=consumed&min_reward=-0.5"
        refreshed = await site.client.get(own, params=given, headers=here | {"hx-trigger": "sessions"})
        assert "hx-push-url" not in refreshed.headers
        again = (await site.client.get(address)).text
        assert "<option selected>consumed</option>" in again
        assert 'value="-0.5"' in again
        ids = re.compile(r'id="link-(ses_\w+)"')
        assert ids.findall(again) == ids.findall(changed.text) != []
