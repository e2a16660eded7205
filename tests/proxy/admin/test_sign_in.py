"""Signing in to the admin page and signing out."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
from itsdangerous import URLSafeSerializer
from sqlalchemy import select

from proxy.admin.sign_in import COOKIE, local_path
from proxy.auth.service import PrincipalKind
from proxy.database.tables import SignOutRow
from proxy.http.services import provide
from proxy.settings import ServerSettings, Settings
from tests.database import sqlite_database
from tests.fakes.run_history import NOW
from tests.proxy.admin.visiting import OWN, enter, pages
from tests.proxy.overview.site import ORIGIN, SECRET, Site, build_site, open_site


def signed(secret: bytes, **content: object) -> str:
    """Return a cookie with this content, signed as the admin page signs its own."""
    signing = {"key_derivation": "hmac", "digest_method": hashlib.sha256}
    text = URLSafeSerializer(secret, salt=b"base-rl admin page", signer_kwargs=signing).dumps(content)
    assert isinstance(text, str)
    return text


async def test_pages_lead_a_stranger_to_the_form_and_back(site: Site, run_id: str) -> None:
    for path in [*await pages(site, run_id), "/admin/runs/calculator/curves", "/admin/nowhere"]:
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
async def test_wrong_keys_get_the_reason(site: Site, run_id: str, kind: PrincipalKind) -> None:
    unknown = await site.client.post("/admin/login", data={"key": "rl-admin-wrong"}, headers=OWN)
    assert unknown.status_code == 401
    assert "unknown here" in unknown.text
    key = await site.credentials.create(kind, run_id=run_id)
    other = await site.client.post("/admin/login", data={"key": key.text}, headers=OWN)
    assert other.status_code == 403
    assert f"{kind} key" in other.text
    assert "set-cookie" not in other.headers


async def test_a_revoked_key_is_out_at_once(site: Site) -> None:
    key_id = await enter(site)
    await site.key(PrincipalKind.ADMIN)
    assert (await site.client.get("/admin")).status_code == 200
    await site.credentials.revoke(key_id)
    assert (await site.client.get("/admin")).status_code == 303


async def test_signing_out_ends_the_sign_in_on_the_server(site: Site, run_id: str, tmp_path: Path) -> None:
    """A copy of the cookie is invalid here, on another proxy on the store, and after a restart; other browsers with
    the same key stay signed in."""
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
        for _ in range(2):  # twice has the same effect
            reply = await site.client.post("/admin/logout", headers=OWN | cookies[0])
            assert reply.status_code == 303
            assert 'base_rl_admin=""' in reply.headers["set-cookie"]
        for client in (site.client, another.client):
            assert [(await client.get("/admin", headers=cookie)).status_code for cookie in cookies] == [303, 200]


async def test_records_of_sign_outs_go_with_their_cookies(tmp_path: Path) -> None:
    now = [NOW]
    async with open_site(sqlite_database(tmp_path), tmp_path, clock=lambda: now[0]) as site:
        for _ in range(3):
            await enter(site)
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
        await enter(site)
        now[0] += 12 * 3600 - 1
        assert (await site.client.get("/admin")).status_code == 200
        now[0] += 2
        assert (await site.client.get("/admin")).status_code == 303
        now[0] = NOW
        key = await site.credentials.create(PrincipalKind.ADMIN)

        forged = signed(b"x" * 32, key=key.id, until=NOW + 9, id="a")
        genuine = signed(SECRET, key=key.id, until=NOW + 9, id="a")
        of_an_older_version = signed(SECRET, key=key.id, until=NOW + 9)
        for cookie, status in ((forged, 303), (genuine, 200), (of_an_older_version, 303), ("junk", 303)):
            site.client.cookies.clear()
            reply = await site.client.get("/admin", headers={"cookie": f"{COOKIE}={cookie}"})
            assert reply.status_code == status


@pytest.mark.parametrize("headers", [{}, {"origin": "https://elsewhere.test"}, {"origin": "null"}])
async def test_another_sites_form_changes_nothing(site: Site, run_id: str, headers: dict[str, str]) -> None:
    await enter(site)
    for path in ("/admin/runs/calculator/pause", "/admin/logout", "/admin/login"):
        assert (await site.client.post(path, headers=headers)).status_code == 403
    assert (await site.overview.run(run_id)).state == "active"


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
def test_signing_in_never_redirects_to_another_site(path: str) -> None:
    assert local_path(path) == "/admin"
