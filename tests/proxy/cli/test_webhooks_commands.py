"""`base-rl webhooks …` with a real server and a real receiver."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.auth.service import PrincipalKind
from proxy.cli.commands import app
from proxy.http.routes import add_routes
from proxy.http.services import provide
from proxy.webhooks import endpoints
from tests.database import sqlite_database
from tests.fakes.run_history import NOW
from tests.proxy.overview.serving import serving
from tests.proxy.overview.site import open_site
from tests.proxy.webhooks.world import Webhooks, open_webhooks


class Installation:
    """A server with webhooks."""

    def __init__(self, webhooks: Webhooks, url: str, key: str) -> None:
        self.webhooks = webhooks
        self._place = ("--url", url, "--api-key", key)

    async def run(self, *arguments: str, status: int = 0) -> str:
        runner = CliRunner(env={"COLUMNS": "300"})
        result = await asyncio.to_thread(runner.invoke, app, ["webhooks", *arguments, *self._place])
        assert result.exit_code == status, result.output
        return result.output


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Installation]:
    async with open_site(sqlite_database(tmp_path), tmp_path, clock=lambda: NOW) as site:
        add_routes(site.app, endpoints.router)
        async with open_webhooks(site.database) as webhooks:
            provide(site.app, webhooks.service)
            key = await site.credentials.create(PrincipalKind.ADMIN, run_id=None)
            async with serving(site) as address:
                yield Installation(webhooks, address, key.text)


async def test_a_webhook_is_created_tested_listed_and_deleted(here: Installation) -> None:
    printed = await here.run("create", here.webhooks.url, "--event", "run", "--event", "version.served")
    assert printed.startswith("whsec_")
    assert "not shown again" in printed
    (webhook,) = json.loads(await here.run("list", "--json"))
    assert webhook["events"] == ["run", "version.served"]
    assert "installation" in await here.run("list")
    for status, exit_status, expected in ((200, 0, "the receiver answered 200"), (500, 1, "it answered 500")):
        here.webhooks.status = status
        testing = asyncio.create_task(here.run("test", webhook["id"], status=exit_status))
        while not testing.done():
            await here.webhooks.deliver()
            await asyncio.sleep(0.02)
        assert expected in await testing
    dead = json.loads(await here.run("deliveries", webhook["id"], "--state", "dead", "--json"))
    assert "it answered 500" in await here.run("deliveries", webhook["id"])
    assert "is due now" in await here.run("redeliver", webhook["id"], dead[0]["id"])
    assert (await here.run("rotate", webhook["id"], "--grace", "60")).startswith("whsec_")
    assert "disabled" in await here.run("disable", webhook["id"])
    assert "on request" in await here.run("list")
    assert "enabled" in await here.run("enable", webhook["id"])
    assert "deleted" in await here.run("delete", webhook["id"])
    assert json.loads(await here.run("list", "--json")) == []


async def test_a_private_url_is_refused_with_the_reason(here: Installation) -> None:
    assert "[outbound] allow" in await here.run("create", "https://10.0.0.1/", "--event", "*", status=1)
