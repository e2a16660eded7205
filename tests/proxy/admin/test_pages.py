from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection, insert, select, update

from proxy.admin.sign_in import COOKIE, SignIn, local_path
from proxy.auth.service import PrincipalKind
from proxy.database.tables import (
    EventRow,
    GroupRow,
    PreferenceRow,
    RewardRow,
    RunRow,
    SessionRow,
    SignOutRow,
    TurnRow,
)
from proxy.http.services import provide
from proxy.lifecycle.lifecycle import settle
from proxy.overview.filters import SessionFilter
from proxy.sessions.identification import AttributedBy
from proxy.settings import ServerSettings, Settings
from tests.database import sqlite_database
from tests.fakes.run_history import NOW, add_run, add_session
from tests.proxy.overview.site import ORIGIN, SECRET, Site, build_site, open_site

OWN = {"origin": ORIGIN}
HOSTILE = """<script>alert(1)</script>"'><img src=x onerror=alert(2)>{{7*7}}</pre></div>"""


async def _enter(site: Site, kind: PrincipalKind = PrincipalKind.ADMIN, run_id: str | None = None) -> str:
    """Signs the site's client in; the key's id."""
    key = await site.credentials.create(kind, run_id=run_id)
    reply = await site.client.post("/admin/login", data={"key": key.text}, headers=OWN)
    assert (reply.status_code, reply.headers["location"]) == (303, "/admin")
    return key.id


async def _pages(site: Site, run_id: str) -> list[str]:
    session = (await site.overview.sessions(run_id, SessionFilter(training="consumed"), limit=1)).sessions[0].id
    run = "/admin/runs/calculator"
    return [
        "/admin", run, f"{run}/sessions", f"{run}/sessions?training=stale", f"{run}/steps/6", f"{run}/steps/0",
        f"{run}/revised",
        f"/admin/sessions/{session}", f"/admin/sessions/{session}?tokens=1",
    ]  # fmt: skip


async def test_every_page_answers_and_lets_only_our_own_files_run(site: Site, run_id: str) -> None:
    await _enter(site)
    for path in [*await _pages(site, run_id), "/admin/login", "/admin/nowhere"]:
        reply = await site.client.get(path)
        assert reply.status_code == (404 if path == "/admin/nowhere" else 200), path
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"


async def test_pages_lead_a_stranger_to_the_form_and_back(site: Site, run_id: str) -> None:
    for path in [*await _pages(site, run_id), "/admin/runs/calculator/curves", "/admin/nowhere"]:
        reply = await site.client.get(path)
        assert reply.status_code == 303, path
        assert reply.headers["location"].startswith("/admin/login?next=/admin"), path
    fragment = await site.client.get("/admin/runs/calculator/sessions", headers={"hx-request": "true"})
    assert (fragment.status_code, fragment.headers["hx-redirect"][:12]) == (401, "/admin/login")
    stream = await site.client.get("/admin/runs/calculator/live", headers={"accept": "text/event-stream"})
    assert stream.status_code == 401
    key = await site.credentials.create(PrincipalKind.ADMIN)
    form = {"key": key.text, "next": "/admin/runs/calculator"}
    reply = await site.client.post("/admin/login", data=form, headers=OWN)
    assert reply.headers["location"] == "/admin/runs/calculator"


async def test_the_cookie_cannot_be_read_by_scripts_or_sent_by_others_and_holds_no_key(site: Site) -> None:
    key = await site.credentials.create(PrincipalKind.ADMIN)
    reply = await site.client.post("/admin/login", data={"key": f" {key.text} "}, headers=OWN)
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/admin" in cookie
    assert key.text not in cookie
    secure = httpx.AsyncClient(transport=httpx.ASGITransport(app=site.app), base_url="https://proxy.test")
    async with secure:
        headers = {"origin": "https://proxy.test"}
        assert (
            "Secure"
            in (await secure.post("/admin/login", data={"key": key.text}, headers=headers)).headers["set-cookie"]
        )


@pytest.mark.parametrize("kind", [PrincipalKind.TRAINER, PrincipalKind.SESSION])
async def test_wrong_keys_are_told_why(site: Site, run_id: str, kind: PrincipalKind) -> None:
    unknown = await site.client.post("/admin/login", data={"key": "rl-admin-wrong"}, headers=OWN)
    assert unknown.status_code == 401
    assert "unknown here" in unknown.text
    key = await site.credentials.create(kind, run_id=run_id)
    other = await site.client.post("/admin/login", data={"key": key.text}, headers=OWN)
    assert other.status_code == 403
    assert f"{kind} key" in other.text
    assert "set-cookie" not in other.headers


async def test_a_revoked_key_is_out_at_once(site: Site) -> None:
    key_id = await _enter(site)
    await site.key(PrincipalKind.ADMIN)
    assert (await site.client.get("/admin")).status_code == 200
    await site.credentials.revoke(key_id)
    assert (await site.client.get("/admin")).status_code == 303


async def test_signing_out_ends_the_sign_in_on_the_server(site: Site, run_id: str, tmp_path: Path) -> None:
    """A copy of the cookie opens nothing any more, neither here nor on another proxy on the store, nor after a
    restart; other browsers of the same key stay signed in."""
    key = await site.credentials.create(PrincipalKind.ADMIN)
    cookies = []
    for _ in range(2):
        site.client.cookies.clear()
        await site.client.post("/admin/login", data={"key": key.text}, headers=OWN)
        cookies.append({"cookie": f"{COOKIE}={site.client.cookies[COOKIE]}"})
    site.client.cookies.clear()
    another = build_site(site.database, tmp_path, lambda: NOW)
    async with another.client:
        for client in (site.client, another.client):
            assert [(await client.get("/admin", headers=cookie)).status_code for cookie in cookies] == [200, 200]
        for _ in range(2):  # twice is once
            reply = await site.client.post("/admin/logout", headers=OWN | cookies[0])
            assert reply.status_code == 303
            assert 'base_rl_admin=""' in reply.headers["set-cookie"]
        for client in (site.client, another.client):
            assert [(await client.get("/admin", headers=cookie)).status_code for cookie in cookies] == [303, 200]


async def test_records_of_sign_outs_go_with_their_cookies(tmp_path: Path) -> None:
    now = [NOW]
    async with open_site(sqlite_database(tmp_path), tmp_path, clock=lambda: now[0]) as site:
        for _ in range(3):
            await _enter(site)
            await site.client.post("/admin/logout", headers=OWN)
            now[0] += 13 * 3600
        rows = await site.database.read(lambda connection: connection.execute(select(SignOutRow.sign_in)).all())
        assert len(rows) == 1


async def test_the_cookie_is_secure_behind_a_gateway_that_speaks_https(site: Site) -> None:
    provide(site.app, Settings(server=ServerSettings(public_url="https://rl.example.org")))
    key = await site.credentials.create(PrincipalKind.ADMIN)
    for origin in (ORIGIN, "https://rl.example.org"):
        reply = await site.client.post("/admin/login", data={"key": key.text}, headers={"origin": origin})
        assert "; Secure" in reply.headers["set-cookie"]


async def test_a_cookie_expires_and_cannot_be_made_up(tmp_path: Path) -> None:
    now = [NOW]
    async with open_site(sqlite_database(tmp_path), tmp_path, clock=lambda: now[0]) as site:
        await _enter(site)
        now[0] += 12 * 3600 - 1
        assert (await site.client.get("/admin")).status_code == 200
        now[0] += 2
        assert (await site.client.get("/admin")).status_code == 303
        now[0] = NOW
        key = await site.credentials.create(PrincipalKind.ADMIN)

        def cookie_of(secret: bytes, **content: object) -> object:
            sign_in = SignIn(secret=secret, clock=lambda: NOW, credentials=site.credentials, database=site.database)
            return sign_in._serializer.dumps(content)

        forged = cookie_of(b"x" * 32, key=key.id, until=NOW + 9, id="a")
        genuine = cookie_of(SECRET, key=key.id, until=NOW + 9, id="a")
        of_an_older_version = cookie_of(SECRET, key=key.id, until=NOW + 9)
        for cookie, status in ((forged, 303), (genuine, 200), (of_an_older_version, 303), ("junk", 303)):
            site.client.cookies.clear()
            reply = await site.client.get("/admin", headers={"cookie": f"{COOKIE}={cookie!s}"})
            assert reply.status_code == status


@pytest.mark.parametrize("headers", [{}, {"origin": "https://elsewhere.test"}, {"origin": "null"}])
async def test_another_sites_form_changes_nothing(site: Site, run_id: str, headers: dict[str, str]) -> None:
    await _enter(site)
    for path in ("/admin/runs/calculator/pause", "/admin/logout", "/admin/login"):
        assert (await site.client.post(path, headers=headers)).status_code == 403
    assert (await site.overview.run(run_id)).state == "active"


async def test_pausing_from_the_page(site: Site, run_id: str) -> None:
    await _enter(site)
    reply = await site.client.post("/admin/runs/calculator/pause", headers=OWN)
    assert (reply.status_code, reply.headers["location"]) == (303, "/admin/runs/calculator")
    page = (await site.client.get("/admin/runs/calculator")).text
    assert "Resume training" in page
    await site.client.post("/admin/runs/calculator/resume", headers=OWN)
    assert (await site.overview.run(run_id)).state == "active"


async def test_a_run_key_sees_its_run_and_learns_of_no_other(site: Site, run_id: str) -> None:
    await add_run(site.database, name="secret-run")
    foreign = await add_session(site.database, (await site.overview.run("secret-run")).id, now=NOW)
    await _enter(site, PrincipalKind.RUN, run_id)
    runs = (await site.client.get("/admin")).text
    assert "calculator" in runs
    assert "secret-run" not in runs
    run = await site.client.get("/admin/runs/calculator")
    assert "Pause training" not in run.text
    assert (await site.client.post("/admin/runs/calculator/pause", headers=OWN)).status_code == 403
    for path in ("runs/secret-run", "runs/secret-run/sessions", "runs/secret-run/curves", f"sessions/{foreign}"):
        assert (await site.client.get(f"/admin/{path}")).status_code == 404


class _Foreign(HTMLParser):
    """Collects what no template of ours contains: scripts and pictures from elsewhere, handlers, styles."""

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
        for table, values in changes:
            connection.execute(update(table.__table__).values(values))

    await site.database.commit(work)
    await _enter(site)
    for path in [*await _pages(site, run_id), f"/admin/sessions/{session}?tokens=1"]:
        text = (await site.client.get(path)).text
        assert _Foreign.in_page(text) == [], path
        assert "{{7*7}}" in text or "/steps/" in path, path
    assert "&lt;script&gt;alert(1)" in (await site.client.get(f"/admin/sessions/{session}")).text


async def test_a_revision_is_told_wherever_the_session_is_shown(site: Site, run_id: str) -> None:
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
    await _enter(site)

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


async def test_hostile_names_in_addresses_and_forms_come_back_as_text(site: Site, run_id: str) -> None:
    await _enter(site)
    reply = await site.client.get("/admin/runs/%3Cscript%3Ealert(1)%3C%2Fscript%3E")
    assert reply.status_code == 404
    assert "<script>alert" not in reply.text
    params = {"group": HOSTILE, "min_reward": HOSTILE, "state": HOSTILE}
    for name, value in params.items():
        page = await site.client.get("/admin/runs/calculator/sessions", params={name: value})
        assert page.status_code == (200 if name == "group" else 400)
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text


@pytest.mark.parametrize(
    "path",
    [
        "https://elsewhere.test/admin",
        "//elsewhere.test/admin",
        "/admin\\@x",
        "javascript:alert(1)",
        "/adminx",
        "/",
        "",
    ],
)
def test_nobody_is_sent_elsewhere_after_signing_in(path: str) -> None:
    assert local_path(path) == "/admin"


async def test_an_empty_run_teaches_how_to_begin(site: Site) -> None:
    await add_run(site.database, name="fresh")
    await _enter(site)
    page = (await site.client.get("/admin/runs/fresh")).text
    assert f"OPENAI_BASE_URL={ORIGIN}/v1" in page
    assert "/v1/feedback" in page


async def test_how_calls_were_attributed_is_shown_and_explained(site: Site, run_id: str) -> None:
    await _enter(site)
    session = await add_session(site.database, run_id, now=NOW, attributed_by="agent_header")
    ours = update(TurnRow).where(TurnRow.session_id == session)
    await site.database.commit(lambda connection: connection.execute(ours.values(attributed_by="prompt_cache_key")))
    page = (await site.client.get(f"/admin/sessions/{session}")).text
    for rule in (AttributedBy.AGENT_HEADER, AttributedBy.PROMPT_CACHE_KEY):
        label = rule.value.replace("_", " ")
        assert f'<span class="rule" title="{html.escape(rule.meaning)}">{label}</span>' in page.replace(
            "&#39;", "&#x27;"
        )


async def test_a_run_says_how_many_calls_told_nothing_and_what_to_do(site: Site, run_id: str) -> None:
    await _enter(site)
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


async def test_the_sessions_table_is_a_fragment_for_htmx_and_goes_on_page_by_page(site: Site, run_id: str) -> None:
    await _enter(site)
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
    await _enter(site)
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
        ("/admin?page=2", "page"),
    ],
)
async def test_addresses_that_mean_nothing_are_refused_by_name(site: Site, run_id: str, path: str, says: str) -> None:
    await _enter(site)
    reply = await site.client.get(path)
    assert reply.status_code == 400
    assert says in reply.text
    assert "All runs" in reply.text
    fragment = await site.client.get(path, headers=HTMX)
    assert (fragment.status_code, fragment.headers["hx-redirect"]) == (400, path)


async def test_the_address_says_which_sessions_are_shown(site: Site, run_id: str) -> None:
    """Empty fields of the form are left out of it; what a page shows by itself does not change it."""
    await _enter(site)
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
