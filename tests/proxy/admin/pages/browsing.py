"""A client that is signed in to the admin page of a whole proxy."""

from __future__ import annotations

import re
from typing import Any

import httpx

from tests.proxy.overview.site import ORIGIN
from tests.running_app import bearer

ADMIN = "rl-admin-chosen"
OWN = {"origin": ORIGIN}


class Browser:
    """A client that is signed in to the admin page."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def enter(self, key: str) -> None:
        self.client.cookies.clear()
        reply = await self.client.post("/admin/login", data={"key": key}, headers=OWN)
        assert reply.status_code == 303, reply.text

    async def page(self, path: str, status: int = 200) -> str:
        reply = await self.client.get(path)
        assert reply.status_code == status, reply.text
        return reply.text

    async def send(self, path: str, status: int = 303, **form: str) -> httpx.Response:
        reply = await self.client.post(path, data=form, headers=OWN)
        assert reply.status_code == status, reply.text
        return reply

    async def ask(self, method: str, path: str, key: str = ADMIN, **body: Any) -> Any:
        reply = await self.client.request(method, path, headers=bearer(key), json=body or None)
        assert reply.is_success, reply.text
        return reply.json()


def secret_in(text: str) -> str:
    found = re.search(r'id="secret">([^<]+)<', text)
    assert found is not None, text
    return found[1]
