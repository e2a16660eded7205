"""Helpers that sign a test's client in to the admin page, and return the addresses of its pages."""

from __future__ import annotations

from proxy.auth.service import PrincipalKind
from proxy.overview.filters import SessionFilter
from tests.proxy.overview.site import ORIGIN, Site

# The origin that a browser sends from a page of ours.
OWN = {"origin": ORIGIN}


async def enter(site: Site, kind: PrincipalKind = PrincipalKind.ADMIN, run_id: str | None = None) -> str:
    """Sign the site's client in with a new key. Return the key's id."""
    key = await site.credentials.create(kind, run_id=run_id)
    reply = await site.client.post("/admin/login", data={"key": key.text}, headers=OWN)
    home = "/admin/review" if kind is PrincipalKind.REVIEWER else "/admin"
    assert (reply.status_code, reply.headers["location"]) == (303, home)
    return key.id


async def pages(site: Site, run_id: str) -> list[str]:
    """Return the addresses of every kind of page of the run `calculator`."""
    session = (await site.overview.sessions(run_id, SessionFilter(training="consumed"), limit=1)).sessions[0].id
    run = "/admin/runs/calculator"
    return [
        "/admin", "/admin/events",
        run, f"{run}/sessions", f"{run}/sessions?training=stale", f"{run}/steps/6", f"{run}/steps/0",
        f"{run}/revised",
        f"/admin/sessions/{session}", f"/admin/sessions/{session}?tokens=1",
    ]  # fmt: skip
